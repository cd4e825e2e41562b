"""Writes the table of metric families in docs/metrics.md."""

from __future__ import annotations

from pathlib import Path

from nimble_jobs.metrics import FAMILIES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
BEGIN, END = "<!-- families: written by scripts/gen_metrics_table.py -->\n", "<!-- end of families -->\n"


def table() -> str:
    """A row for each family: the names that queries use, its kind, its labels and its help."""
    lines = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for family in FAMILIES:
        names = ", ".join(f"`{name}`" for name in family.sample_names)
        labels = ", ".join(f"`{label}`" for label in family.labels) or "-"
        lines.append(f"| {names} | {family.kind} | {labels} | {family.help} |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """The page with the table as it is now."""
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    assert found, f"{PAGE} lacks the marks around its table"
    return f"{before}{BEGIN}{table()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
