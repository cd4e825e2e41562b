"""Imports a model file with its neighbours, without leaving traces in `sys.path` or short names in `sys.modules`.

The file and its neighbours become modules of a package whose name is made from their contents. During the import,
`import helper` means the neighbour `helper.py`. Afterwards the short name is gone, so two models may both have a
`helper.py`. This works for top-level imports and for imports inside the factory, but not for imports that run later.
Sources are always compiled from their present bytes; cached bytecode is neither read nor written. An `__init__.py`
beside the model file does not run.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from nimble_jobs.models.local_files import NEVER_LOCAL, local_files
from nimble_jobs.regular import read_regular

_PACKAGE = "_nimble_model_"  # what the names of packages begin with
_lock = threading.RLock()  # the import system is one for the whole process


class _FreshSource(importlib.machinery.SourceFileLoader):
    """Compiles the source each time. Cached bytecode is valid by whole seconds and size, too coarse for a digest."""

    def get_code(self, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        return self.source_to_code(read_regular(path), path)


class _Alias(importlib.abc.Loader):
    """Makes a short name stand for a module of the model's package."""

    def __init__(self, real: str) -> None:
        self.real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.real)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # the import system has just replaced it


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, folder: Path, package: str) -> None:
        self.folder, self.package = folder, package
        self.aliases: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.startswith(f"{self.package}."):
            return self._real(fullname, path or [])
        top = fullname.partition(".")[0]
        if top in NEVER_LOCAL or (path is not None and top not in self.aliases):
            return None
        real = f"{self.package}.{fullname}"
        places = [str(self.folder)] if path is None else path
        spec = self._real(real, places)
        if spec is None or (spec.loader is None and _installed(top)):
            return None
        self.aliases.add(fullname)
        return ModuleSpec(fullname, _Alias(real))

    def _real(self, fullname: str, places: Sequence[str]) -> ModuleSpec | None:
        for place in places:
            finder = importlib.machinery.FileFinder(place, (_FreshSource, [".py"]))
            spec = finder.find_spec(fullname)
            if spec is not None:
                return spec
        return None


def _installed(name: str) -> bool:
    """Whether an installed package has this name. It then precedes a folder without `__init__.py`."""
    spec = importlib.machinery.PathFinder.find_spec(name)
    return spec is not None and spec.loader is not None


@contextmanager
def imported(main: Path) -> Iterator[ModuleType]:
    """The module of the file `main`. Neighbours can be imported inside the block; errors of its code come through."""
    with _lock:
        found = local_files(main)
        digest = hashlib.sha256(str(main.parent).encode())
        for name, path in found.files.items():
            digest.update(name.encode() + b"\0" + read_regular(path))
        package = f"{_PACKAGE}{digest.hexdigest()[:16]}"
        _forget(package)
        shell = ModuleType(package)
        shell.__path__ = [str(main.parent)]
        sys.modules[package] = shell
        finder = _Finder(main.parent, package)
        hidden = _hide(main.parent)
        sys.meta_path.insert(0, finder)
        try:
            yield importlib.import_module(f"{package}.{main.stem}")
        except BaseException:
            _forget(package)
            raise
        finally:
            sys.meta_path.remove(finder)
            for name in finder.aliases:
                sys.modules.pop(name, None)
            sys.modules.update(hidden)


def namespaces(module: str) -> dict[str, dict[str, Any]]:
    """The globals of the module of this name, as "", and of the others that were imported with it, by their names.

    Only until the same files are imported again. Nothing if `imported` has not made the module.
    """
    package = module.partition(".")[0]
    if not package.startswith(_PACKAGE):
        return {}
    there = {name: vars(sys.modules[name]) for name in list(sys.modules) if name.startswith(f"{package}.")}
    return {"" if name == module else name.removeprefix(f"{package}."): space for name, space in there.items()}


def _forget(package: str) -> None:
    for name in [n for n in sys.modules if n == package or n.startswith(f"{package}.")]:
        del sys.modules[name]


def _hide(folder: Path) -> dict[str, ModuleType]:
    """Remove other modules with the neighbours' names from `sys.modules`, and return them."""
    local = {p.stem for p in folder.glob("*.py")} | {p.parent.name for p in folder.glob("*/__init__.py")}
    local -= NEVER_LOCAL
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in local}
