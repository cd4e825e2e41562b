"""Findings of rules, and the register of rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nimble_jobs.spec.model import JobSpec
from nimble_jobs.spec.tree import Where


@dataclass(frozen=True, slots=True)
class Finding:
    """A contradiction: the field it is about, and the field whose line is shown (by default the same)."""

    field: str  # dotted
    problem: str
    expected: str = ""
    index: int | None = None  # index of the item, if the field is a list
    at: str | None = None


def worded(field: str, message: str, *, at: str | None = None) -> Finding:
    """A finding from a message of an error, which says at its end what is expected."""
    problem, found, expected = message.rpartition("; expected ")
    return Finding(field, problem, expected, at=at) if found else Finding(field, message, at=at)


def place(field: str, index: int | None = None) -> Where:
    """A dotted field as a place in the tree."""
    where: Where = tuple(field.split("."))
    return where if index is None else (*where, index)


Check = Callable[[JobSpec], Iterable[Finding]]
Rule = tuple[tuple[str, ...], Check]  # the fields that the check looks at


def register(rules: list[Rule]) -> Callable[..., Callable[[Check], Check]]:
    """A decorator `rule(*fields)` that adds a check that looks at these fields to `rules`."""

    def rule(*needs: str) -> Callable[[Check], Check]:
        def add(check: Check) -> Check:
            rules.append((needs, check))
            return check

        return add

    return rule
