"""Rewrites functions of torch that needlessly read a value on the host, in terms of operators that do not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

Varies = Callable[[Any], bool]


def rewritten(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], varies: Varies) -> Callable[[], Any] | None:
    """A call that does the same without a host read; None if the function can be called as it is.

    `varies` says whether a tensor may hold other values in a replay.
    """
    match name:
        case "one_hot":
            return _one_hot(*args, **kwargs)
        case "_pack_padded_sequence" if not kwargs and not varies(args[1]):
            return _packed(*args)
        case "_pad_packed_sequence" if not kwargs and not varies(args[1]):
            return _unpacked(*args)
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
        return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)  # raises for a class that does not exist

    return call


def _packed(padded: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Callable[[], Any] | None:
    """Pack sequences of constant lengths: pick rows by constant positions."""
    count, most = (padded.shape[0], padded.shape[1]) if batch_first else (padded.shape[1], padded.shape[0])
    each = lengths.tolist()
    if len(each) != count or not each or min(each) < 1 or each[0] > most or each != sorted(each, reverse=True):
        return None  # torch says what is wrong

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        sizes = [sum(length > step for length in each) for step in range(each[0])]
        stride, step_stride = (most, 1) if batch_first else (1, count)
        rows = [b * stride + step * step_stride for step, size in enumerate(sizes) for b in range(size)]
        return _picked(padded.flatten(0, 1), rows), torch.tensor(sizes)

    return call


def _unpacked(
    data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding: float, total: int
) -> Callable[[], Any] | None:
    """Pad packed sequences of constant lengths again."""
    sizes = batch_sizes.tolist()
    if not sizes or 0 < total < len(sizes):
        return None  # torch says what is wrong

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        steps, count = max(total, len(sizes)), sizes[0]
        starts = [0, *accumulate(sizes)]
        held = [*sizes, *[0] * (steps - len(sizes))]
        behind = len(data)  # the row of padding
        order = [starts[step] + b if b < size else behind for step, size in enumerate(held) for b in range(count)]
        whole = torch.cat([data, data.new_full((1, *data.shape[1:]), padding)])
        lengths = torch.tensor([sum(b < size for size in sizes) for b in range(count)])
        padded = _picked(whole, order).unflatten(0, (steps, count))
        return padded.transpose(0, 1) if batch_first else padded, lengths

    return call


def _picked(rows: torch.Tensor, which: list[int]) -> torch.Tensor:
    return rows.index_select(0, torch.tensor(which, device=rows.device))


def _places(
    tensor: torch.Tensor, index: Any, varies: Varies
) -> tuple[list[tuple[int, torch.Tensor]], list[Any]] | None:
    """The dimensions that an integer on the device selects, each with that integer, and the other indexes.

    None if there is no such integer, or if the other indexes leave it open which dimension it selects.
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
    """A number as an index tensor of one element that counts from the start."""
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
