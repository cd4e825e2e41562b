"""`schedule.kernels`: a field for each kernel or rewrite of our own, by the name that switches it off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field, create_model, model_serializer

from nimble_jobs.kernel_switches import Kernel, Without
from nimble_jobs.spec.fields import Frozen


class _Switches(Frozen):
    @property
    def without(self) -> Without:
        """What is switched off."""
        return frozenset(kernel for kernel in Kernel if not getattr(self, kernel.value))

    @model_serializer
    def _off(self) -> dict[str, bool]:
        """Only what differs from the default: specs that mean the same are stored as the same."""
        without = self.without
        return {kernel.value: False for kernel in Kernel if kernel in without}


if TYPE_CHECKING:  # a class that is made as the module is loaded is no type for mypy
    KernelsSpec = _Switches
else:
    _fields: dict[str, Any] = {
        kernel.value: (bool, Field(default=True, title=kernel.value, description=kernel.says)) for kernel in Kernel
    }
    KernelsSpec = create_model(
        "KernelsSpec",
        __base__=_Switches,
        __doc__="Kernels and rewrites of our own that a search may try; false leaves one out.",
        **_fields,
    )
