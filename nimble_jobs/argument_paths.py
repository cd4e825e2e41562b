"""Names of a call's arguments: `x`, positions such as `0`, and dotted ones for what is inside: `x.pixels`."""

from __future__ import annotations

import re
from collections.abc import Sequence

PART = "input.part."  # begins the names of a key's parts that describe an argument each; its path follows
PATH = re.compile(r"(?:[A-Za-z_][A-Za-z0-9_]*|[0-9]+)(?:\.[A-Za-z0-9_]+)*")


def check_paths(paths: Sequence[str]) -> None:
    """Raises ValueError unless the paths can be given to one call, each of them a value of its own.

    No path may be given twice or lie inside another, and positions must be counted from 0.
    """
    for path in paths:
        if not PATH.fullmatch(path):
            raise ValueError(f"{path!r:.60} names no argument; expected a name such as x, or a dotted one such as x.a")
    inside: dict[str, set[str]] = {}
    for path in paths:
        names = path.split(".")
        for depth, name in enumerate(names):
            inside.setdefault(".".join(names[:depth]), set()).add(name)
    for path in sorted(paths):
        if path in inside:
            raise ValueError(f"{path} is given both as a whole and in parts: {path}.{min(inside[path])}")
        if paths.count(path) > 1:
            raise ValueError(f"{path} is given twice")
    for outer, names_inside in inside.items():
        positions = sorted(int(name) for name in names_inside if name.isdigit())
        if positions != list(range(len(positions))) or (outer and positions and len(positions) < len(names_inside)):
            given = ", ".join(sorted(names_inside))
            where = f"the entries of {outer}" if outer else "the positional arguments"
            raise ValueError(f"{where} are {given}; expected either names, or positions counted from 0")
