"""What a rule found."""

from __future__ import annotations

from dataclasses import dataclass

from nimble_jobs.spec.tree import Where


@dataclass(frozen=True, slots=True)
class Finding:
    """A contradiction: the field it is about, and the field whose line is shown (by default the same)."""

    field: str  # dotted
    problem: str
    expected: str = ""
    index: int | None = None  # of the item, where the field is a list
    at: str | None = None


def place(field: str, index: int | None = None) -> Where:
    """A dotted field as a place in the tree."""
    where: Where = tuple(field.split("."))
    return where if index is None else (*where, index)
