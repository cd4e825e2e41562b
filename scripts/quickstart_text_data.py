"""Writes the texts of the text quick start to jobs/data, once: passages out of the documentation of Python packages.

Beside them stands a link to the small sentence model that its package ships.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nimble_jobs.bench.text.models import minilm
from nimble_jobs.bench.text.prose import PACKAGES, Passage, passages

DATA = Path(__file__).resolve().parents[1] / "jobs" / "data"
EACH = 200  # passages of a package
WORDS = range(15, 90)
QUESTIONS = (
    "How do I find the shortest route between two places?",
    "Split a number into its prime factors.",
    "Colour a map so that neighbours differ.",
    "Which people in a network are the most influential?",
    "Sort the elements of an array.",
    "Do something after a transaction was undone.",
)


def chosen(package: str) -> list[Passage]:
    """Some passages of a package, always the same: of public objects, neither short nor long, one of each object."""
    first: dict[str, Passage] = {}
    for passage in passages(package):
        public = not any(part.startswith("_") for part in passage.name.split("."))
        if public and len(passage.text.split()) in WORDS:
            first.setdefault(passage.name, passage)
    found = list(first.values())
    order = np.random.default_rng(0).permutation(len(found))[:EACH]
    return [found[i] for i in sorted(order)]


def texts(data: Path = DATA, packages: Sequence[str] = PACKAGES) -> None:
    """passages.parquet, with the questions after the passages: columns id, package and text."""
    path = data / "passages.parquet"
    if path.exists():
        return
    rows = [(found.name, package, found.text) for package in packages for found in chosen(package)]
    rows += [(f"question-{number}", "question", text) for number, text in enumerate(QUESTIONS, start=1)]
    ids, packages, found = zip(*rows, strict=True)
    temporary = path.with_suffix(".tmp")
    pq.write_table(pa.table({"id": ids, "package": packages, "text": found}), temporary)
    temporary.replace(path)
    print(f"{path.name}: {len(rows) - len(QUESTIONS):,} passages and {len(QUESTIONS)} questions")


def model(data: Path = DATA) -> None:
    """A link to the model's folder."""
    link, folder = data / "minilm", minilm()
    if not link.is_symlink() or link.resolve() != folder.resolve():
        link.unlink(missing_ok=True)
        link.symlink_to(folder)


if __name__ == "__main__":
    DATA.mkdir(parents=True, exist_ok=True)
    texts()
    model()
