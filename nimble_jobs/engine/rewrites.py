"""Functions of torch's that read a value on the host although they could do without: the same in other operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Varies = Callable[[Any], bool]


def rewritten(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], varies: Varies) -> Callable[[], Any] | None:
    """What does the same without a host read; None where the function is to be called as it is.

    `varies` says whether a tensor may hold something else at a replay.
    """
    match name:
        case "one_hot":
            return _one_hot(*args, **kwargs)
        case "__getitem__" if not kwargs:
            return _selected(args[0], args[1], varies)
        case "__setitem__" if not kwargs:
            return _set(args[0], args[1], args[2], varies)
    return None


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> Callable[[], Any] | None:
    if num_classes < 1 or tensor.dtype is not torch.int64 or tensor.numel() == 0:
        return None

    def call() -> torch.Tensor:
        zeros = torch.zeros((*tensor.shape, num_classes), dtype=torch.int64, device=tensor.device)
        return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)  # which raises for a class that there is not

    return call


def _places(
    tensor: torch.Tensor, index: Any, varies: Varies
) -> tuple[list[tuple[int, torch.Tensor]], list[Any]] | None:
    """The dimensions that are selected by a whole number on the device, each with it, and the other indexes; None where
    there is no such number, or what else there is leaves it open which dimension is meant.
    """
    entries = list(index) if isinstance(index, tuple) else [index]
    if not any(_is_number(e) and varies(e) for e in entries):
        return None
    if any(isinstance(e, list | bool) or (isinstance(e, torch.Tensor) and not _is_number(e)) for e in entries):
        return None
    used = sum(e is not None and e is not Ellipsis for e in entries)
    dim, found, rest = 0, [], []
    for entry in entries:
        if _is_number(entry) and varies(entry):
            found.append((dim, entry))
        else:
            rest.append(entry)
        dim += 0 if entry is None else tensor.dim() - used if entry is Ellipsis else 1
    return found, rest


def _is_number(entry: Any) -> bool:
    whole = (torch.int8, torch.int16, torch.int32, torch.int64)
    return isinstance(entry, torch.Tensor) and entry.dim() == 0 and entry.dtype in whole


def _position(number: torch.Tensor, size: int) -> torch.Tensor:
    """As an index of one element that counts from the start."""
    number = number.long().reshape(1)
    return torch.where(number < 0, number + size, number)


def _selected(tensor: torch.Tensor, index: Any, varies: Varies) -> Callable[[], Any] | None:
    places = _places(tensor, index, varies)
    if places is None:
        return None
    found, rest = places

    def call() -> torch.Tensor:
        result = tensor
        for dim, number in reversed(found):
            result = result.index_select(dim, _position(number, tensor.shape[dim])).squeeze(dim)
        return result[tuple(rest)] if rest else result

    return call


def _set(tensor: torch.Tensor, index: Any, value: Any, varies: Varies) -> Callable[[], Any] | None:
    places = _places(tensor, index, varies)
    if places is None:
        return None
    found, rest = places

    def call() -> None:
        dims = [dim for dim, _ in found]
        front = tensor.movedim(dims, list(range(len(dims))))
        part = front[(*(slice(None) for _ in dims), *rest)]
        positions = tuple(_position(n, tensor.shape[dim])[0] for dim, n in found)
        if not isinstance(value, torch.Tensor):
            part.index_put_(positions, torch.full((), value, dtype=tensor.dtype, device=tensor.device))
        else:
            part.index_put_(positions, value.to(tensor.dtype))

    return call
