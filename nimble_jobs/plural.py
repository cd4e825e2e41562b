"""Formats numbers with their nouns, lists of names, and sizes, for all messages and listings."""

from __future__ import annotations

from collections.abc import Sequence

_IRREGULAR = {
    "entry": "entries",
    "batch": "batches",
    "class": "classes",
    "is": "are",
    "was": "were",
    "its": "their",
    "it": "they",
    "replay in flight": "replays in flight",
    "process": "processes",
}


def plural(number: int, noun: str) -> str:
    """The noun alone: job, or jobs if the number is not 1."""
    return noun if number == 1 else _IRREGULAR.get(noun, f"{noun}s")


def count(number: int, noun: str) -> str:
    """1 job, 2 jobs, 1,000 jobs."""
    return f"{number:,} {plural(number, noun)}"


def some(names: Sequence[object], most: int = 5) -> str:
    """a, b, c; of many the first ones, and how many more there are. Bytes that are no UTF-8 become `\\udcff`."""
    rest = len(names) - most
    shown = ", ".join(map(str, names[:most])).encode("utf-8", "backslashreplace").decode()
    return shown + (f" and {rest:,} more" if rest > 0 else "")


def by(size: Sequence[int]) -> str:
    """224x288, for a height and a width."""
    return f"{size[0]}x{size[1]}"
