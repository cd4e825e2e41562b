"""Links between the project's documents lead somewhere: to a file that is there, and to one of its headings."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^()\s]+)\)")
FENCED = re.compile(r"^( *```).*?^ *```", re.DOTALL | re.MULTILINE)


@cache
def headings(document: Path) -> frozenset[str]:
    """The names by which links reach its headings, as GitHub makes them."""
    text = FENCED.sub("", document.read_text())
    titles = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles]
    return frozenset(re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    text = FENCED.sub("", document.read_text())
    for link in LINK.findall(text):
        if re.match(r"[a-z][a-z0-9+.-]*:", link):  # of another site
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), f"no file: {link}"
        if anchor and target.suffix == ".md":
            assert anchor in headings(target), f"no heading: {link}"
