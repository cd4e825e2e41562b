"""Imports only torchvision's models for classification. Everything else in torchvision takes several times as long.

While `torchvision.models` is imported, empty modules stand in for the parts below. These are imported later, as soon as
something names them or asks the registry for a model that it does not have yet. A version of torchvision that needs
more of these parts is imported as usual.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

_COMPILER, _UTILITIES = "torch._dynamo", "torch._dynamo.utils"  # asked one question, by one operator (RoIAlign)
_OTHER_MODELS = ("detection", "optical_flow", "quantization", "segmentation", "video")
# Tells torch's older exporter to ONNX, which takes long to import, how to write operators that detection models use.
_EXPORT = "torchvision.ops._register_onnx_ops"
_REGISTERS = "torchvision._meta_registrations"
_ONCE = {"torchvision.extension", _REGISTERS}  # what these register stays registered
_LATER = {"torchvision": ("datasets",), "torchvision.models": _OTHER_MODELS}


def import_torchvision() -> None:
    """Make sure that torchvision.models is imported."""
    if "torchvision" not in sys.modules:
        before = set(sys.modules)
        places = _places()
        _say_who_registers()
        sys.modules.update(places)
        try:
            importlib.import_module("torchvision.models")
        except (ImportError, AttributeError):
            for name in set(sys.modules) - before - _ONCE:
                if name.partition(".")[0] == "torchvision":
                    del sys.modules[name]
        else:
            _let_import()
        finally:
            for name, place in places.items():
                if sys.modules.get(name) is place:
                    del sys.modules[name]
    importlib.import_module("torchvision.models")


def import_other_models() -> None:
    """Make sure that every model of torchvision is registered, and that its operators can be exported."""
    import_torchvision()
    if _EXPORT not in sys.modules:
        importlib.import_module(_EXPORT)._register_custom_op()
    for name in _OTHER_MODELS:
        importlib.import_module(f"torchvision.models.{name}")


class _Registry(dict[str, Any]):
    """torchvision's models by name. It knows those for classification, and imports the others for further questions.

    `in` answers for what is there: torchvision asks it before it registers a model.
    """

    def __init__(self, known: dict[str, Any]) -> None:
        super().__init__(known)
        self._whole = False

    def _fill(self) -> None:
        if not self._whole:
            self._whole = True
            try:
                import_other_models()
            except BaseException:
                self._whole = False
                raise

    def __missing__(self, name: str) -> Any:
        self._fill()
        if dict.__contains__(self, name):
            return dict.__getitem__(self, name)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        self._fill()
        return super().__iter__()

    def __len__(self) -> int:
        self._fill()
        return super().__len__()

    def keys(self) -> Any:
        self._fill()
        return super().keys()

    def values(self) -> Any:
        self._fill()
        return super().values()

    def items(self) -> Any:
        self._fill()
        return super().items()


def _places() -> dict[str, ModuleType]:
    names = [f"{package}.{name}" for package, several in _LATER.items() for name in several]
    names += [_COMPILER, _UTILITIES] if _COMPILER not in sys.modules else []
    names += [_EXPORT] if "torch.onnx" not in sys.modules else []
    places: dict[str, Any] = {name: ModuleType(name) for name in names}
    if _COMPILER in places:
        places[_COMPILER].__path__ = []
        places[_UTILITIES].is_compile_supported = _is_compile_supported
    if _EXPORT in places:
        places[_EXPORT]._register_custom_op = lambda: None
    return places


def _say_who_registers() -> None:
    """Tell `inspect` which module a file of torchvision's is.

    The file registers an operator, and torch asks for the line where it does. `inspect` would look for the file among
    all modules, which takes as long as a third of the import.
    """
    spec = importlib.util.find_spec("torchvision")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        file = Path(folder).absolute() / f"{_REGISTERS.rpartition('.')[2]}.py"
        inspect.modulesbyfile.setdefault(str(file), _REGISTERS)


def _let_import() -> None:
    """Let attributes of the packages be what they would be, had all been imported at once."""
    for package, several in _LATER.items():
        module: Any = sys.modules[package]
        for name in several:
            vars(module).pop(name, None)

        def found(name: str, package: str = package) -> ModuleType:
            if name not in _LATER[package]:
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
            return importlib.import_module(f"{package}.{name}")

        module.__getattr__ = found
    api: Any = sys.modules.get("torchvision.models._api")
    if isinstance(getattr(api, "BUILTIN_MODELS", None), dict):
        api.BUILTIN_MODELS = _Registry(api.BUILTIN_MODELS)
    else:
        import_other_models()


def _is_compile_supported(device_type: str) -> bool:
    utilities = importlib.import_module(_UTILITIES)
    return bool(utilities.is_compile_supported(device_type))
