"""Whether a folder lies in another one, seen through links, `..`, letter case and mounts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

Identity = tuple[int, int]


def holds(folder: str | Path, path: str | Path) -> bool:
    """Whether `path` is the folder or lies in it. Neither need exist."""
    real = Path(os.path.realpath(path))
    if real.is_relative_to(os.path.realpath(folder)):
        return True
    identity = _identity(folder)
    return identity is not None and identity in _around(real)


def is_or_contains(folder: str | Path, path: str | Path) -> str:
    """Whether a folder that holds `path` is that path or contains it, as a word for messages."""
    return "is" if holds(path, folder) else "contains"


def about_home(output: Path, home: Path) -> str | None:
    """The problem if an output folder is the state folder, lies in it or contains it; else None."""
    real, real_home = Path(os.path.realpath(output)), Path(os.path.realpath(home))
    identity = _identity(real)
    if real_home.is_relative_to(real) or (identity is not None and identity in _around(real_home)):
        return f"{is_or_contains(real, real_home)} the state folder {home}"
    if real.is_relative_to(real_home):
        return f"lies in the state folder {home}"
    around = _around(real)
    return f"lies in the state folder {home}" if any(_identity(f) in around for f in _folders(home)) else None


def _folders(home: Path) -> Iterator[str]:
    """The folders of a state folder, since one of them may also be mounted elsewhere."""
    yield str(home)
    for folder in (home, home / "artifacts"):
        try:
            with os.scandir(folder) as entries:
                yield from (entry.path for entry in entries if entry.is_dir())
        except OSError:  # not there yet
            continue


def _around(real: Path) -> set[Identity]:
    """The identities of the path and of every folder above it, if they exist."""
    found, above = set[Identity](), str(real)
    while True:
        place, above = above, os.path.dirname(above)  # noqa: PTH120 - every job asks; `parents` takes ten times as long
        if (identity := _identity(place)) is not None:
            found.add(identity)
        if place == above:
            return found


def _identity(path: str | Path) -> Identity | None:
    try:
        info = os.stat(path)  # noqa: PTH116
    except (OSError, ValueError):
        return None
    return info.st_dev, info.st_ino
