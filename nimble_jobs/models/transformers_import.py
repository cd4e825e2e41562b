"""Imports transformers without what no forward pass needs: most of its own import is that.

`transformers.modeling_utils` and a model's module import torch's compiler with SymPy and Triton, distributed tensors
and checkpoints, and SciPy for the losses of detectors. Here these are imported at their first use (`later.py`). To know
which names it has, transformers also reads each of its 2,500 files, twice. Here it reads them once it is asked for a
name that it does not know yet. Some versions have Python look for every file of every installed package, to learn
which package a module is of. Here the packages' own lists of files say it.

This depends on private names, and on what transformers imports where. So it is done for the versions below only. All
others are imported as usual, and so are these if their import fails this way.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nimble_jobs.errors import NimbleError
from nimble_jobs.models.identity import importable, opened
from nimble_jobs.models.later import Later
from nimble_jobs.models.torchvision_import import import_torchvision
from nimble_jobs.sentence import transformer_folder

log = logging.getLogger(__name__)

_LIBRARY, _MODELING, _COMPILER = "transformers", "transformers.modeling_utils", "torch._dynamo"
_STRUCTURE = "transformers.utils.import_utils"  # what reads the files
_DISTRIBUTED, _TENSORS = "transformers.distributed.utils", "torch.distributed.tensor"
_FAMILIES = (
    _COMPILER,
    *(_TENSORS, "torch.distributed.fsdp", "torch.distributed._composable"),
    "torch.distributed.checkpoint",
    "torch.distributed._functional_collectives",
    *("huggingface_hub.hf_api", "jinja2"),  # downloads and uploads, templates of chats
    *("scipy", "sklearn"),  # losses of detectors, speculative decoding
)
# Versions that were tested, each with modules of its own that use distributed tensors while they are imported.
_TESTED = {
    "5.17": ("transformers.distributed.tensor_parallel", "transformers.distributed.sharding_utils"),
    "5.23": ("transformers.distributed.tensor_parallel", "transformers.distributed.expert_parallel"),
}


_KNOWN = ("_objects", "_class_to_module", "_modules")  # tables of a package of transformers


def import_transformers(folder: Path) -> None:
    """Import transformers.modeling_utils, and the module of the model in a folder if its name follows from config.json.

    Only for a process that has just begun: until this returns, no other thread may import what is left out. Raises
    ImportError if transformers is not there.
    """
    own = _TESTED.get(_version())
    if own is not None and _LIBRARY not in sys.modules:
        names, marks = _Names(), _Marks()
        after = {_STRUCTURE: names.hold_back, _COMPILER: marks.apply, _DISTRIBUTED: _look_first}
        try:
            if importlib.util.find_spec("torchvision") is not None:  # transformers takes names of its transforms
                import_torchvision()
            with _quick_owners(), Later(_LIBRARY, (*_FAMILIES, *own), own={_COMPILER: marks.own}, after=after):
                importlib.import_module(_MODELING)
                _import_model(folder)
        except Exception as error:  # noqa: BLE001  # whatever meets a stand-in where it expects more
            log.debug("transformers is imported as usual: %s", error)
            for name in [name for name in sys.modules if f"{name}.".startswith(f"{_LIBRARY}.")]:
                del sys.modules[name]
        else:
            names.let_read()
    importlib.import_module(_MODELING)
    _import_model(folder)


@contextlib.contextmanager
def _quick_owners() -> Iterator[None]:
    """Find out which package a module is of without asking the disk for every file."""
    names: Any = vars(importlib.metadata)
    usual = names["packages_distributions"]
    names["packages_distributions"] = _owners
    try:
        yield
    finally:
        names["packages_distributions"] = usual


def _owners() -> dict[str, list[str]]:
    """The installed distributions that provide each importable name, as importlib.metadata.packages_distributions."""
    found: dict[str, list[str]] = {}
    for distribution, names in importable():
        for name in names:
            found.setdefault(name, []).append(distribution.metadata["Name"])
    return found


def _import_model(folder: Path) -> None:
    try:
        with opened(transformer_folder(folder) / "config.json") as file:
            kind = str(json.load(file).get("model_type")).replace("-", "_")
    except (OSError, ValueError, AttributeError, NimbleError):  # whoever builds the model says what is wrong
        return
    name = f"{_LIBRARY}.models.{kind}.modeling_{kind}"
    if kind.isidentifier() and importlib.util.find_spec(f"{_LIBRARY}.models.{kind}") is not None:
        importlib.import_module(name)


def _version() -> str:
    """Without its last part; empty if transformers is not installed."""
    try:
        return importlib.metadata.version(_LIBRARY).rpartition(".")[0]
    except importlib.metadata.PackageNotFoundError:
        return ""


def _look_first(utilities: Any) -> None:
    """Let transformers ask whether a weight is distributed, as it does for each, without importing the class."""
    usual = getattr(utilities, "is_dtensor", None)
    if usual is not None:
        utilities.is_dtensor = lambda tensor: _TENSORS in sys.modules and usual(tensor)


class _Names:
    """Which names transformers has: those of `models/` only once something asks for one that is not known without."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._read: Callable[[Any], Any] | None = None  # as transformers does it
        self._utilities: Any = None

    def hold_back(self, utilities: Any) -> None:
        """Let transformers read the names in `models/auto/` only."""
        self._utilities, self._read = utilities, utilities.create_import_structure_from_path
        models = Path(utilities.__file__).parents[1] / "models"

        def read(path: Any) -> Any:
            assert self._read is not None
            if Path(path) not in (models, models / "__init__.py"):
                return self._read(path)
            return {"auto": self._read(models / "auto")}

        utilities.create_import_structure_from_path = read

    def let_read(self) -> None:
        """Let the packages that were imported like that read the rest when they need it."""
        self._utilities.create_import_structure_from_path = self._read
        getattr(self._utilities.define_import_structure, "cache_clear", list)()
        for name in (_LIBRARY, f"{_LIBRARY}.models"):
            if name in sys.modules:
                self._let_read(sys.modules[name])

    def _let_read(self, package: Any) -> None:
        usual: Any = type(package)
        complete = self._complete

        class Incomplete(usual):  # type: ignore[misc]
            """The package until all of its names are known."""

            def __getattr__(self, name: str) -> Any:
                known = name.startswith("__") or any(name in vars(self)[table] for table in _KNOWN)
                if not known:
                    complete(self, usual)
                return usual.__getattr__(self, name)

            def __dir__(self) -> Any:
                complete(self, usual)
                return usual.__dir__(self)

            def __reduce__(self) -> Any:
                complete(self, usual)
                return usual.__reduce__(self)

            @property
            def __all__(self) -> Any:
                complete(self, usual)
                return vars(self)["__all__"]

        package.__class__ = Incomplete

    def _complete(self, package: Any, usual: Any) -> None:
        with self._lock:
            if type(package) is usual:
                return
            models = Path(self._utilities.__file__).parents[1] / "models"
            prefix = "models" if package.__name__ == _LIBRARY else None
            structure = self._utilities.define_import_structure(models, prefix=prefix)
            whole = usual(package.__name__, package.__file__, structure, module_spec=package.__spec__)
            for table in ("_class_to_module", "_object_missing_backend", "_import_structure", "_modules"):
                vars(package)[table] = vars(whole)[table] | vars(package)[table]
            vars(package)["__all__"] = list(dict.fromkeys([*vars(package)["__all__"], *vars(whole)["__all__"]]))
            package.__class__ = usual


class _Marks:
    """What decorators of `torch._dynamo` say about functions of transformers. The compiler is told once it is there.

    Until then nothing can compile these functions.
    """

    def __init__(self) -> None:
        self._marks: list[Callable[[Any], object]] = []
        self.own: dict[str, object] = {"disable": self._disable}
        for how in ("allow_in_graph", "assume_constant_result"):
            self.own[how] = functools.partial(self._mark, how)

    def apply(self, compiler: Any) -> None:
        """Tell the compiler."""
        for mark in self._marks:
            mark(compiler)

    def _mark(self, how: str, function: Any) -> Any:
        self._marks.append(lambda compiler: getattr(compiler, how)(function))
        return function

    def _disable(self, function: Any = None, recursive: bool = True, **options: Any) -> Any:
        if function is None:
            return functools.partial(self._disable, recursive=recursive, **options)
        if not inspect.isfunction(function):
            raise TypeError(f"{function!r} is no function, so its calls cannot be watched")
        now: Callable[..., Any] = function

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return now(*args, **kwargs)

        def mark(compiler: Any) -> None:
            nonlocal now
            now = compiler.disable(function, recursive, **options)
            compiler.disable(call, recursive, **options)  # or it would compile the call of what is not to be compiled

        self._marks.append(mark)
        return call
