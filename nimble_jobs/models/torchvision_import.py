"""Import torchvision without torch's compiler, which it needs for one question of one operator (RoIAlign).

The compiler takes longer to import than a stored schedule to load. Its place is held, while torchvision is imported, by
a module that asks the real one when the question comes. Where torchvision wants more, it is imported as usual.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

_COMPILER, _UTILITIES = "torch._dynamo", "torch._dynamo.utils"


def import_torchvision() -> None:
    """Make sure that torchvision.models is imported."""
    if "torchvision" not in sys.modules and _COMPILER not in sys.modules:
        places = {name: ModuleType(name) for name in (_COMPILER, _UTILITIES)}
        places[_COMPILER].__path__ = []
        places[_UTILITIES].is_compile_supported = _is_compile_supported  # type: ignore[attr-defined]
        before = set(sys.modules)
        sys.modules.update(places)
        try:
            importlib.import_module("torchvision.models")
        except (ImportError, AttributeError):  # another torchvision, which needs more of the compiler
            for name in set(sys.modules) - before:
                if name.partition(".")[0] == "torchvision":
                    del sys.modules[name]
        finally:
            for name in places:
                sys.modules.pop(name, None)
    importlib.import_module("torchvision.models")


def _is_compile_supported(device_type: str) -> bool:
    utilities = importlib.import_module(_UTILITIES)
    return bool(utilities.is_compile_supported(device_type))
