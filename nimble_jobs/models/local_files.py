"""Which files a Python model is made of, found by reading its import statements; nothing is executed.

Imports made by `importlib.import_module` or `exec`, and data files that the code opens, are not seen.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

# Names that never mean a neighbour of the model file: a `random.py` beside it must not replace the standard library's
# for every other module that is imported meanwhile.
NEVER_LOCAL = frozenset(sys.stdlib_module_names) | {"torch", "torchvision", "numpy", "nimble_jobs"}


@dataclass(frozen=True, kw_only=True)
class LocalFiles:
    """What a model file imports, transitively."""

    files: dict[str, Path]  # by path relative to the model file's folder, with slashes; the model file among them
    packages: frozenset[str]  # top-level names that are neither local nor of the standard library


def local_files(main: Path) -> LocalFiles:
    """Every file below the folder of `main` that importing `main` can execute."""
    folder = main.parent
    files: dict[str, Path] = {}
    packages: set[str] = set()
    queue = [main]
    while queue:
        path = queue.pop()
        name = path.relative_to(folder).as_posix()
        if name in files:
            continue
        files[name] = path
        package = path.relative_to(folder).parent.parts
        for dotted, absolute in _imports(path, package):
            found = [] if absolute and dotted[0] in NEVER_LOCAL else _resolve(folder, dotted)
            queue.extend(found)
            if absolute and not found and dotted[0] not in sys.stdlib_module_names:
                packages.add(dotted[0])
    local = {Path(name).parts[0].removesuffix(".py") for name in files}
    return LocalFiles(files=dict(sorted(files.items())), packages=frozenset(packages - local))


def _imports(path: Path, package: tuple[str, ...]) -> list[tuple[tuple[str, ...], bool]]:
    """Dotted names that the file may import, from the model's folder; the flag says absolute."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # its digest still counts; running it reports what is wrong
        return []
    found: list[tuple[tuple[str, ...], bool]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(tuple(alias.name.split(".")), True) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            up = node.level - 1
            if up > len(package):
                continue
            base = () if node.level == 0 else package[: len(package) - up]
            base += tuple(node.module.split(".")) if node.module else ()
            found += [((*base, alias.name), node.level == 0) for alias in node.names]
    return found


def _resolve(folder: Path, dotted: tuple[str, ...]) -> list[Path]:
    """Files that importing the dotted name executes, as far as they exist below the folder."""
    found: list[Path] = []
    place = folder
    for part in dotted:
        if part == "*":  # may import whatever __all__ names
            found += sorted(place.glob("*.py")) if place != folder else []
            break
        place = place / part
        if (place / "__init__.py").is_file():
            found.append(place / "__init__.py")
        elif place.with_name(f"{part}.py").is_file():
            found.append(place.with_name(f"{part}.py"))
            break
        elif not place.is_dir():
            break
    return found
