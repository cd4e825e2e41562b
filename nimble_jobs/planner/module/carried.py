"""What a model that runs in eager carries from one batch to the next: state that a job must find as it was first."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from nimble_jobs.engine.attributes import Attributes
from nimble_jobs.engine.contents import Contents
from nimble_jobs.engine.fingerprints import fingerprints
from nimble_jobs.engine.held import Held
from nimble_jobs.engine.memory import is_dense
from nimble_jobs.engine.private.modes import functions_off
from nimble_jobs.engine.private.tensors import version


class Carried:
    """A module as it was before a job's first batch.

    Holds copies of tensors that are no parameters. A parameter is known by its version and by a fingerprint of its
    bits, for which all weights are read: see `weigh`.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.held = Held(module)
        self._versions = _versions(module)
        self._weights: dict[str, int] | None = None

    def weigh(self) -> None:
        """Take the fingerprints of parameters, once: to be called before the module is, in eager."""
        if self._weights is None:
            self._weights = _weights(self._module)

    def put_back(self) -> bool:
        """Make the module what it was, if that can be done; whether it is."""
        if self.altered() is None:
            return True
        self.held.snapshot.put_back()
        return self.altered() is None

    def altered(self) -> str | None:
        """The name of something of the module's that is not as it was; None if all is."""
        contents = Contents(self._module)
        tensor = self.held.differing_tensor(contents)
        if tensor is not None:
            return tensor
        weighed = self._weights is not None
        self.weigh()
        assert self._weights is not None
        return (
            _differing(self._versions, _versions(self._module))
            or self.held.attributes.differing(Attributes(contents))
            or (_differing(self._weights, _weights(self._module)) if weighed else None)
        )


def _differing(before: Mapping[str, object], now: Mapping[str, object]) -> str | None:
    return next((name for name in (*before, *now) if before.get(name) != now.get(name)), None)


def _versions(module: nn.Module) -> dict[str, int | None]:
    """How often each parameter was written; None in inference mode, which does not count."""
    with functions_off():
        return {n: None if p.is_inference() else version(p) for n, p in module.named_parameters()}


def _weights(module: nn.Module) -> dict[str, int]:
    """A parameter may be written through `.data`, which counts no version. So its bits are read."""
    return fingerprints({n: p for n, p in module.named_parameters() if _plain(p)})


def _plain(parameter: torch.Tensor) -> bool:
    whole = is_dense(parameter) and not parameter.is_quantized and parameter.device.type != "meta"
    return whole and type(parameter) is nn.Parameter
