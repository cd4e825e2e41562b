"""Lets a library be imported without modules that it names but rarely uses. They are imported at their first use.

While `Later` is entered, a stand-in is imported instead of each module of the given families, and from a stand-in every
name can be imported. A `Name` imports its module as soon as it is called, subclassed or asked for an attribute.
`isinstance` with it needs no import: before its module is imported, nothing can be an instance of its class. Once a
module is imported for real, by whoever needs it, the library's modules hold its objects instead of the names. So what
the library does is the same; only when it imports something differs.
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class Name:
    """Stands for one name of a module."""

    def __init__(self, later: Later, module: str, name: str) -> None:
        self.__dict__.update(_later=later, _module=module, _name=name)

    def _real(self) -> Any:
        return getattr(self._later.real(self._module), self._name)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._real(), attribute)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._real()(*args, **kwargs)

    def __instancecheck__(self, value: object) -> bool:
        real = self._later.imported(self._module, self._name)
        return real is not None and isinstance(value, real)

    def __subclasscheck__(self, kind: type) -> bool:
        real = self._later.imported(self._module, self._name)
        return real is not None and issubclass(kind, real)

    def __mro_entries__(self, _bases: tuple[object, ...]) -> tuple[type, ...]:
        return (self._real(),)

    def __or__(self, _other: object) -> Any:  # an annotation, such as `Name | None`; nobody checks these
        return Any

    __ror__ = __or__


class Later(importlib.abc.MetaPathFinder):
    """Stand-ins for families of modules, such as `torch.distributed.tensor` with all below it, while it is entered.

    `library` is the package whose modules will hold the names. `own` says which attributes of a stand-in are not names.
    `after` says what to call with a real module once it is imported, be it one of a family or another one.

    Nothing else may import from these families in another thread while this is entered.
    """

    def __init__(
        self,
        library: str,
        families: Sequence[str],
        *,
        own: Mapping[str, Mapping[str, object]],
        after: Mapping[str, Callable[[Any], None]],
    ) -> None:
        self._library, self._own, self._after = library, own, dict(after)
        self._families = [name for name in families if name not in sys.modules]
        self._standing: dict[str, ModuleType] = {}  # until their real modules are imported
        self._entered = False

    def __enter__(self) -> Later:
        self._entered = True
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._withdraw()
        if error is not None and self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """A stand-in while this is entered; a real module that something waits for; None for all others."""
        stand_in = self._entered and any(f"{fullname}.".startswith(f"{family}.") for family in self._families)
        if not stand_in and fullname not in self._after and fullname not in self._standing:
            return None
        found = PathFinder.find_spec(fullname, path)
        if found is None or found.loader is None:
            return found
        if not stand_in:
            found.loader = _Then(found.loader, self._arrive)
            return found
        spec = ModuleSpec(fullname, _StandIn(self._stand_in), origin=found.origin, is_package=True)
        spec.submodule_search_locations = found.submodule_search_locations or []
        return spec

    def imported(self, module: str, name: str) -> Any:
        """What the real module has by that name; None before it is imported."""
        held = sys.modules.get(module)
        return None if held is self._standing.get(module) else getattr(held, name, None)

    def real(self, name: str) -> ModuleType:
        """The real module. If this is still entered, all that is imported from now on is real."""
        self._withdraw()
        return importlib.import_module(name)

    def _stand_in(self, name: str) -> ModuleType:
        module, own = ModuleType(name), self._own.get(name, {})

        def attribute(wanted: str) -> object:
            if wanted.startswith("__"):
                raise AttributeError(wanted)
            if not self._entered:
                return getattr(self.real(name), wanted)
            return own[wanted] if wanted in own else Name(self, name, wanted)

        vars(module)["__getattr__"] = attribute
        self._standing[name] = module
        return module

    def _withdraw(self) -> None:
        self._entered = False
        for name, module in self._standing.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
            parent, _, child = name.rpartition(".")
            if parent in sys.modules and vars(sys.modules[parent]).get(child) is module:
                delattr(sys.modules[parent], child)

    def _arrive(self, module: ModuleType) -> None:
        """Put a real module's objects where the library's modules hold its names."""
        self._after.pop(module.__name__, _nothing)(module)
        stand_in = self._standing.pop(module.__name__, None)
        if stand_in is not None:
            for name, holder in list(sys.modules.items()):
                if f"{name}.".startswith(f"{self._library}."):
                    for key, value in list(vars(holder).items()):
                        if value is stand_in:
                            setattr(holder, key, module)
                        elif type(value) is Name and vars(value)["_module"] == module.__name__:
                            setattr(holder, key, getattr(module, vars(value)["_name"]))
        if not (self._entered or self._standing or self._after) and self in sys.meta_path:
            sys.meta_path.remove(self)


class _StandIn(importlib.abc.Loader):
    """Makes a stand-in, which has nothing to run."""

    def __init__(self, make: Callable[[str], ModuleType]) -> None:
        self._make = make

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._make(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Then(importlib.abc.Loader):
    """Another loader, and a call once the module has run."""

    def __init__(self, real: Any, then: Callable[[ModuleType], None]) -> None:
        self._real, self._then = real, then

    def __getattr__(self, name: str) -> Any:  # such as get_source
        return getattr(self._real, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._real.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._real
        self._then(module)


def _nothing(_module: ModuleType) -> None:
    pass
