"""The tensors of a module's state, found again and again without making its state dict, which takes milliseconds."""

from __future__ import annotations

import torch
from torch import nn

from nimble_jobs.engine.memory import is_dense
from nimble_jobs.errors import ModelError
from nimble_jobs.workloads.training.flat import lies


class Live:
    """What a checkpoint holds of a module, by name: its state dict, and the buffers that are no part of that.

    Where the state dict holds anything but the parameters and buffers themselves, as hooks may have it, it is made anew
    each time. Children must stay: only what they hold may be replaced.
    """

    def __init__(self, module: nn.Module) -> None:
        """Raises ModelError as `weights` does."""
        self._module = module
        owners = _owners(module)
        state = weights(module)
        plain = all(name in owners and lies(getattr(*owners[name])) == lies(tensor) for name, tensor in state.items())
        self._weights = {name: owners[name] for name in state} if plain else None
        self._unsaved = {name: owners[name] for name in unsaved(module)}

    def weights(self) -> dict[str, torch.Tensor]:
        """As the module's state dict, by the same names. Raises ModelError as `weights` does."""
        return weights(self._module) if self._weights is None else _found(self._weights)

    def unsaved(self) -> dict[str, torch.Tensor]:
        """Buffers that are no part of it."""
        return _found(self._unsaved)


_Places = dict[str, tuple[nn.Module, str]]


def _owners(module: nn.Module) -> _Places:
    """Which child holds each parameter and buffer, and under which name there."""
    found: _Places = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        for name, _ in (*child.named_parameters(recurse=False), *child.named_buffers(recurse=False)):
            found[f"{prefix}.{name}" if prefix else name] = (child, name)
    return found


def _found(places: _Places) -> dict[str, torch.Tensor]:
    return {name: getattr(child, held) for name, (child, held) in places.items()}


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """The module's state dict. Raises ModelError where it holds more than dense tensors."""
    state = module.state_dict()
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise ModelError(f"train.checkpoint: {name} of the model's state is a {type(value).__name__}, no tensor")
        if not is_dense(value):
            raise ModelError(f"train.checkpoint: {name} of the model's state is not dense; a checkpoint cannot hold it")
    return dict(state)


def unsaved(module: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that are no part of the module's state dict."""
    state = module.state_dict()
    return {name: buffer for name, buffer in module.named_buffers() if name not in state}
