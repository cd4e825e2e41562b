"""Finds the files of a Python model by reading its import statements. Nothing is executed.

It sees `import` in all its forms, and `importlib.import_module` and `__import__` with a literal name. It does not see
computed names, code that is run by `exec`, `runpy` or the model's own loader, sources that the model compiles itself
(`torch.utils.cpp_extension`), and data files that it opens.
"""

from __future__ import annotations

import ast
import functools
import sys
from dataclasses import dataclass
from pathlib import Path

from nimble_jobs.regular import read_regular

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


def imported_packages(path: Path) -> set[str]:
    """Top-level names that a file imports absolutely, without those of the standard library."""
    return {dotted[0] for dotted, absolute in _imports(path, ()) if absolute} - sys.stdlib_module_names


def _imports(path: Path, package: tuple[str, ...]) -> list[tuple[tuple[str, ...], bool]]:
    """Dotted names that the file may import, from the model's folder; the flag says absolute."""
    return [
        ((*package[: len(package) - level + 1], *dotted) if level else dotted, level == 0)
        for level, dotted in _named(read_regular(path))
        if level - 1 <= len(package)
    ]


@functools.lru_cache(maxsize=1024)
def _named(code: bytes) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """The names that a source imports, each with its number of leading dots. Cached, since parsing is slow."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):  # its digest still counts; running it reports what is wrong
        return ()
    found: list[tuple[int, tuple[str, ...]]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(0, tuple(alias.name.split("."))) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = tuple(node.module.split(".")) if node.module else ()
            found += [(node.level, (*base, alias.name)) for alias in node.names]
        elif isinstance(node, ast.Call):
            name = _literal(node)
            bare = name.lstrip(".")
            found += [(len(name) - len(bare), tuple(bare.split(".")))] if bare else []
    return tuple(found)


def _literal(node: ast.Call) -> str:
    """The name in `import_module("name")` or `__import__("name")`, whose dots count from the file's own package."""
    function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
    if function not in ("import_module", "__import__") or not node.args:
        return ""
    name = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
    return name if isinstance(name, str) else ""


def _resolve(folder: Path, dotted: tuple[str, ...]) -> list[Path]:
    """Files that importing the dotted name executes, as far as they exist below the folder."""
    found: list[Path] = []
    place = folder
    for part in dotted:
        if part == "*":  # may import whatever __all__ names
            found += sorted((*place.glob("*.py"), *place.glob("*/__init__.py"))) if place != folder else []
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
