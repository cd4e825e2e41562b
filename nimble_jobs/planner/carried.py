"""What a model that runs in eager carries from one batch to the next: state that a job must find as it was first."""

from __future__ import annotations

import torch
from torch import nn

from nimble_jobs.engine.memory import is_dense
from nimble_jobs.engine.private import functions_off
from nimble_jobs.engine.state import Snapshot, attributes, tensors_in


class Carried:
    """A module as it was before a job's first batch.

    Holds copies of tensors that are no parameters; parameters are told by their version and the sum of their bits.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._snapshot = Snapshot(module)
        self._tensors = {n: id(t) for n, t in tensors_in(module).items()}
        self._parameters = {n: _mark(p) for n, p in module.named_parameters()}
        self._attributes = attributes(module)

    def put_back(self) -> bool:
        """Make the module what it was, if that can be done; whether it is."""
        if self.altered() is None:
            return True
        self._snapshot.put_back()
        return self.altered() is None

    def altered(self) -> str | None:
        """The name of something of the module's that is not as it was; None where all is."""
        tensors = {n: id(t) for n, t in tensors_in(self._module).items()}
        for name in (*self._tensors, *tensors):
            if self._tensors.get(name) != tensors.get(name):
                return name
        changing = self._snapshot.resized() or next(iter(self._snapshot.changing(containers=True)), None)
        if changing is not None:
            return changing
        for name, parameter in self._module.named_parameters():
            if self._parameters.get(name) != _mark(parameter):
                return name
        now = attributes(self._module)
        return next((n for n in (*self._attributes, *now) if self._attributes.get(n) != now.get(n)), None)


def _mark(parameter: torch.Tensor) -> object:
    """What another value of a parameter does not have: it may be written through `.data`, which counts no version."""
    with torch.no_grad(), functions_off():
        version = None if parameter.is_inference() else parameter._version
        plain = type(parameter) is nn.Parameter and is_dense(parameter) and parameter.device.type != "meta"
        if not plain or parameter.is_complex() or parameter.dtype is torch.bool:
            return version
        whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[parameter.element_size()]
        return version, int(parameter.detach().view(whole).sum())
