"""Answers at once for tensors that have no values, on torch's meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_FILLS = (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)


class Unfilled(TorchFunctionMode):
    """While it is entered, a few functions of tensors without values do no work.

    transformers builds a model of such tensors before it loads the weights. For these functions torch would run its own
    Python code. That imports SymPy, and torch's compiler in order to keep it off that code: a second in all. Every
    other call goes its usual way.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensor: Any = kwargs.get("tensor", args[0] if args else None)
        if func in _FILLS and isinstance(tensor, torch.Tensor) and tensor.is_meta:
            return tensor
        if kwargs.keys() == {"device"} and kwargs["device"] is not None and len(args) == 1:
            if func is torch.arange and type(tensor) is int and tensor >= 0 and torch.device(**kwargs).type == "meta":
                return torch.empty(tensor, dtype=torch.int64, **kwargs)
            if func is torch.empty_like and tensor.is_meta and tensor.is_contiguous():
                return torch.empty(tensor.shape, dtype=tensor.dtype, **kwargs)
        return func(*args, **kwargs)
