"""The values of `--grid KEY=A,B`, and their combinations."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nimble_jobs.errors import UsageError
from nimble_jobs.spec.units import show

MOST = 10_000  # combinations
_OPEN, _CLOSE = "[{", "]}"

Combination = tuple[tuple[str, str], ...]  # dotted keys, each with one value, in YAML


def parse_grid(texts: Sequence[str]) -> list[Combination]:
    """The combinations of `KEY=A,B` texts, the last key fastest. Commas in quotes, brackets and braces part nothing.

    Raises UsageError for a text without values, a key or a value given twice, and more than 10,000 combinations.
    """
    grid: dict[str, list[str]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        key = key.strip()
        if not equals or not key:
            raise UsageError(f"--grid: found {show(text)}; expected KEY=VALUE,VALUE, such as input.batch_size=32,64")
        if key in grid:
            raise UsageError(f"--grid: {key} is given twice; expected each key once, with all of its values")
        grid[key] = list(_parted(values))
        for value in grid[key]:
            if not value:
                raise UsageError(f"--grid: {key}: found an empty value; expected KEY=VALUE,VALUE")
            if grid[key].count(value) > 1:
                raise UsageError(f"--grid: {key}: {value} is given twice; expected each value once")
    return _combined(grid)


def combinations(grid: Mapping[str, Sequence[Any]]) -> list[Combination]:
    """The combinations of values, as `parse_grid` has them of texts. Raises UsageError."""
    if empty := [key for key, values in grid.items() if not values]:
        raise UsageError(f"grid: {empty[0]} has no values; expected at least one")
    return _combined({key: [json.dumps(value) for value in values] for key, values in grid.items()})


def _combined(grid: Mapping[str, Sequence[str]]) -> list[Combination]:
    count = math.prod(len(values) for values in grid.values())
    if not grid or count > MOST:
        raise UsageError(f"--grid: found {count if grid else 0:,} combinations; expected from 1 to {MOST:,}")
    return [tuple(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _parted(text: str) -> Iterator[str]:
    depth, quote, start = 0, "", 0
    for i, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'" and not text[start:i].strip():
            quote = letter
        elif letter in _OPEN:
            depth += 1
        elif letter in _CLOSE:
            depth -= 1
        elif letter == "," and depth == 0:
            yield text[start:i].strip()
            start = i + 1
    yield text[start:].strip()
