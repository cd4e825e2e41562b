"""Code on the import path that no version names: modules beside the project, editable installs.

What is installed in `site-packages` is known by its version, whatever somebody may have edited in it.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Collection
from pathlib import Path

from nimble_jobs.models.local_files import NEVER_LOCAL, imported_packages
from nimble_jobs.models.steady import steady
from nimble_jobs.regular import read_regular

_INSTALLED = {"site-packages", "dist-packages"}


def unversioned_code(names: Collection[str]) -> dict[str, str]:
    """SHA-256 in hex over the files of each module that is not from an installed package, by importable name.

    These are the modules among `names`, and those that they import. All files of a package with code count, imported or
    not. Nothing is executed. Raises ModelChanged if this process has imported a module that has changed since.
    """
    found: dict[str, str] = {}
    queue = sorted(names)
    seen = set(NEVER_LOCAL)
    while queue:
        name = queue.pop()
        if name in seen:
            continue
        seen.add(name)
        files = _files(name)
        if files:
            found[name] = steady(name, "code", _digest(files))
            queue += {other for path in files.values() if path.suffix == ".py" for other in imported_packages(path)}
    return dict(sorted(found.items()))


def _files(name: str) -> dict[str, Path]:
    """The files of a module or package outside of the installed ones, by their paths below it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a module that is loaded may have lost its spec
        return {}
    if spec is None:
        return {}
    if spec.submodule_search_locations is None:
        places = [Path(spec.origin)] if spec.has_location and spec.origin else []
    else:
        places = [Path(place) for place in spec.submodule_search_locations]
    files: dict[str, Path] = {}
    for place in places:
        if _INSTALLED.isdisjoint(place.parts):
            several = sorted(p for p in place.rglob("*") if p.suffix in (".py", ".so")) if place.is_dir() else [place]
            files |= {path.relative_to(place.parent).as_posix(): path for path in several}
    return files


def _digest(files: dict[str, Path]) -> str:
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        data = read_regular(path)
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()
