"""Operator arguments as schedule values, and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from nimble_jobs.engine import collectives, fused_convolutions  # noqa: F401  # programs name their operators
from nimble_jobs.engine.private.operators import OpOverload
from nimble_jobs.errors import CannotRecord, EngineError
from nimble_jobs.schedule import Arg, Special, View

HERE = "@"  # stands for the device that the schedule runs on, whatever its index


def view_of(tensor: torch.Tensor, buffer: int) -> View:
    """A tensor's place in buffer number `buffer`."""
    return View(
        buffer=buffer,
        dtype=_short(tensor.dtype),
        itemsize=tensor.element_size(),
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        offset=int(tensor.storage_offset()),
    )


def dtype(name: str) -> torch.dtype:
    """The torch dtype of a name such as float32. Raises EngineError for anything else."""
    value = getattr(torch, name, None)
    if not isinstance(value, torch.dtype):
        raise EngineError(f"the schedule uses the dtype {name!r}, which this version of torch does not have")
    return value


def encode(value: Any, tensor: Callable[[torch.Tensor], View], device: torch.device) -> Arg:
    """An operator argument as a schedule value; `tensor` gives the view of each tensor in it.

    Raises CannotRecord for objects that no schedule can hold (generators, Python objects).
    """
    match value:
        case torch.Tensor():
            return tensor(value)
        case None | bool() | str():
            return value
        case torch.SymInt():
            return int(value)
        case int():
            return value
        case float():
            return value if math.isfinite(value) else Special(kind="float", value=repr(value))
        case complex():
            return Special(kind="complex", value=repr(value))
        case torch.dtype():
            return Special(kind="dtype", value=_short(value))
        case torch.device():
            return Special(kind="device", value=HERE if value.type == device.type else str(value))
        case torch.layout():
            return Special(kind="layout", value=_short(value))
        case torch.memory_format():
            return Special(kind="memory_format", value=_short(value))
        case list() | tuple():
            return tuple(encode(v, tensor, device) for v in value)
        case _:
            raise CannotRecord(f"no schedule can hold an argument of type {type(value).__name__}")


def decode(arg: Arg, tensor: Callable[[View], Any], device: torch.device) -> Any:
    """Inverse of `encode`. `tensor` turns each view into a tensor or whatever stands for one."""
    match arg:
        case View():
            return tensor(arg)
        case Special():
            return _special(arg, device)
        case tuple():
            return [decode(a, tensor, device) for a in arg]
        case _:
            return arg


def operator(name: str) -> OpOverload:
    """The operator overload of a name such as aten.add.Tensor. Raises EngineError where torch has none."""
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.rpartition(".")
    try:
        op = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except AttributeError:
        op = None
    if not isinstance(op, OpOverload):
        raise EngineError(f"the schedule uses the operator {name!r}, which this version of torch does not have")
    return op


def _special(arg: Special, device: torch.device) -> Any:
    match arg.kind:
        case "dtype":
            return dtype(arg.value)
        case "device":
            return device if arg.value == HERE else torch.device(arg.value)
        case "float":
            return float(arg.value)
        case "complex":
            return complex(arg.value)
        case "layout" | "memory_format":
            return getattr(torch, arg.value)
        case _:
            raise EngineError(f"the schedule holds an argument of the unknown kind {arg.kind!r}")


def _short(value: object) -> str:
    return str(value).removeprefix("torch.")
