"""Private names around modules: their tables, their hooks, and base classes that torch does not show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

Convolution = nn.modules.conv._ConvNd
BatchNorm = nn.modules.batchnorm._BatchNorm
WithStatistics = nn.modules.batchnorm._NormBase  # normalisations whose statistics training changes


def global_hooks(*, backward: bool) -> dict[str, dict[int, Any]]:
    """The hooks that every module calls, by name; those of the backward pass where asked for."""
    names = ["_global_forward_pre_hooks", "_global_forward_hooks"]
    if backward:
        names += ["_global_backward_pre_hooks", "_global_backward_hooks"]
    return {f"torch.nn.modules.module.{name}": getattr(torch.nn.modules.module, name) for name in names}


def backward_hooks(module: torch.nn.Module) -> bool:
    """Whether a module, or every module, has hooks on its backward pass."""
    own = module._backward_hooks or module._backward_pre_hooks
    everywhere = torch.nn.modules.module
    return bool(own or everywhere._global_backward_hooks or everywhere._global_backward_pre_hooks)


def walk(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The same as `named_modules`, but faster. A class may override that method; an instance may not."""
    seen: set[nn.Module] = set()
    waiting = [("", module)]
    while waiting:
        prefix, part = waiting.pop()
        if part in seen:
            continue
        if type(part).named_modules is not nn.Module.named_modules:
            yield from part.named_modules(seen, prefix, True)
            continue
        seen.add(part)
        yield prefix, part
        before = f"{prefix}." if prefix else ""
        waiting += [(before + n, child) for n, child in reversed(part._modules.items()) if child is not None]


def parameters_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The table of a module's own parameters; to write into it replaces them."""
    table: dict[str, Any] = module._parameters
    return table


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The table of a module's own buffers; to write into it replaces them."""
    return module._buffers


def saved_names(module: nn.Module) -> set[str]:
    """The names of a module's own tensors that are saved with it."""
    return {*module._parameters.keys(), *module._buffers.keys()} - module._non_persistent_buffers_set  # also scripted


def tables_of(module: nn.Module) -> tuple[Any, ...]:
    """Everything that makes up a module by itself: its attributes, its tensors, its children, its forward hooks."""
    own = (vars(module), module._parameters, module._buffers, module._modules, module._non_persistent_buffers_set)
    return (*own, module._forward_hooks, module._forward_pre_hooks)


def calls_forward_alone(module: nn.Module) -> bool:
    """Whether a call of a module is its forward method and nothing else."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return not any(hooks) and not parametrize.is_parametrized(module) and "forward" not in vars(module)
