"""Makes input for checks and timing: random numbers, or integers and masks like an example's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch

from nimble_jobs.engine.encode import dtype
from nimble_jobs.packing import Layout, Part
from nimble_jobs.preprocess import SIGNED, Usual
from nimble_jobs.schedule import Port

# int: integers below it, and normal floating values; Usual: values as records hold them; Layout: rows of bytes.
Below = int | Usual | Layout

_NONE: Mapping[str, torch.Tensor] = MappingProxyType({})


def random_inputs(
    ports: tuple[Port, ...],
    device: torch.device,
    seed: int,
    below: Below = 2,
    integers: Mapping[str, torch.Tensor] = _NONE,
    *,
    turn: int = 0,
    scale: float = 1.0,
) -> dict[str, torch.Tensor]:
    """Fresh input for each port, drawn by `draw`.

    Ports named in `integers` get values like those given there, so that no index goes out of range: see `varied`.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    made = {}
    for port in ports:
        kind = dtype(port.view.dtype)
        if port.name in integers:
            value = varied(integers[port.name].detach().cpu(), generator, turn)
        else:
            value = draw(port.view.shape, kind, below, generator=generator, scale=scale, turn=turn)
        laid = torch.empty_strided(port.view.shape, port.view.stride, dtype=value.dtype, device=device)
        made[port.name] = laid.copy_(value)  # with the example's strides, since models may ask for them
    return made


def draw(
    shape: Sequence[int],
    kind: torch.dtype,
    below: Below,
    *,
    generator: torch.Generator | None = None,
    device: torch.device | None = None,
    scale: float = 1.0,
    turn: int = 0,
) -> torch.Tensor:
    """Random values: normal times `scale` for floating types, integers in [0, below) for others.

    With a `Usual`, values lie in the range of records; `scale` stretches them around its middle. With a `Layout`, they
    are rows of bytes, and `turn` selects the shape of the masks in them.
    """
    if isinstance(below, Layout):
        values = {part.path: _packed(part, shape[0], generator, turn, scale) for part in below.parts}
        rows = torch.from_numpy(below.pack(values))
        return rows if device is None else rows.to(device)
    floating = kind.is_floating_point or kind.is_complex
    if isinstance(below, Usual):
        return _recorded(tuple(shape), kind, below, generator, device, scale)
    if floating:
        drawn = torch.complex64 if kind.is_complex else torch.float32  # torch cannot draw in narrow types
        return (torch.randn(tuple(shape), generator=generator, dtype=drawn, device=device) * scale).to(kind)
    return torch.randint(0, below, tuple(shape), generator=generator, device=device).to(kind)


def _recorded(
    shape: tuple[int, ...],
    kind: torch.dtype,
    usual: Usual,
    generator: torch.Generator | None,
    device: torch.device | None,
    scale: float,
) -> torch.Tensor:
    if usual.centre is not None:
        trailing = [1] * (-1 - usual.axis)
        centre, width = (
            torch.tensor(v, dtype=torch.float64, device=device).reshape(-1, *trailing)
            for v in (usual.centre, usual.width)
        )
        drawn = torch.randn(shape, generator=generator, device=device)
        values = centre + width * (drawn * scale)
        if kind.is_floating_point:
            most = torch.finfo(kind).max  # records of float16 may lie close to what it can hold
            return values.clamp(-most, most).to(kind)
        return values.round().clamp(usual.low, usual.high).long().to(kind)
    fits = kind is not torch.bool and torch.iinfo(kind).min <= usual.low and usual.high <= torch.iinfo(kind).max
    whole = kind if fits and scale == 1.0 else torch.int64
    values = torch.randint(usual.low, usual.high + 1, shape, generator=generator, device=device, dtype=whole)
    if scale != 1.0:
        middle = (usual.low + usual.high) // 2
        values = ((values - middle) * scale + middle).round().clamp(usual.low, usual.high).long()
    return values.to(kind)  # keeps the lowest bits if the type is signed and the records' is not


def _packed(part: Part, count: int, generator: torch.Generator | None, turn: int, scale: float) -> np.ndarray:
    """Values of one of several inputs, as rows store them: [count, *part.stored]. `_mask` says what `turn` selects."""
    shape = (count, *part.stored)
    if part.is_made:
        longest = part.shape[0]
        lengths = torch.randint(1, longest + 1, shape, generator=generator, dtype=torch.int32)
        return {1: torch.full_like(lengths, longest), 2: torch.ones_like(lengths)}.get(turn % 4, lengths).numpy()
    if part.is_flags:
        flags = _mask(torch.ones(shape, dtype=torch.bool), generator, turn).clone()
        flags[..., 0] |= ~flags.any(-1)  # a model may divide by their number
        return flags.numpy().astype(part.dtype)
    kind: torch.dtype = getattr(torch, SIGNED.get(part.dtype, part.dtype))
    if part.gives == "float":
        found = draw(
            shape, kind, 2 if part.preprocess is None else part.preprocess.usual, generator=generator, scale=scale
        )
    else:
        found = torch.randint(0, part.below or 2, shape, generator=generator).to(kind)
    return found.numpy().view(part.dtype)


def like(example: Mapping[str, torch.Tensor], factor: float) -> dict[str, torch.Tensor]:
    """The example with its floating values times `factor`.

    For models that cannot take random numbers, such as ones that factorise a matrix.
    """
    return {n: _times(t, factor) if t.is_floating_point() else t.clone() for n, t in example.items()}


def stand_out(example: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inputs that random numbers must not replace: integers and masks, also floating masks of two values."""
    return {n: t for n, t in example.items() if not (t.is_floating_point() or t.is_complex()) or is_mask(t)}


def varied(example: torch.Tensor, generator: torch.Generator, turn: int) -> torch.Tensor:
    """Other values of the same kind as the example; `turn` selects the variant.

    - Masks: padded right, padded left, random, full.
    - Sorted lists of integers: another sorted list with the same first and last value.
    - Other integers: shuffled, drawn from the example's values, or drawn from their range.
    - Floating values: all times one random number.
    """
    if example.numel() == 0:
        return example.clone()
    if is_mask(example):
        return _mask(example, generator, turn)
    if example.is_floating_point() or example.is_complex():
        return _times(example, 0.5 + 1.5 * float(torch.rand((), generator=generator)))
    low, high = int(example.min()), int(example.max())
    if example.dim() == 1 and low < high:
        for flipped in (False, True):
            line = example.flip(0) if flipped else example
            if bool((line[1:] >= line[:-1]).all()):
                redrawn = torch.randint(low, high + 1, line.shape, generator=generator).sort().values.to(line.dtype)
                redrawn[0], redrawn[-1] = line[0], line[-1]
                return redrawn.flip(0) if flipped else redrawn
    flat = example.flatten()
    if low == high:
        low = min(low, 1 if low > 0 else 0) if high >= 0 else low
        found = torch.randint(low, high + 1, flat.shape, generator=generator)
    elif turn % 3 == 0:
        found = flat[torch.randperm(len(flat), generator=generator)]
    elif turn % 3 == 1:
        found = flat[torch.randint(0, len(flat), flat.shape, generator=generator)]
    else:
        found = torch.randint(low, high + 1, flat.shape, generator=generator)
    return found.to(example.dtype).view(example.shape)


def _times(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    wide = tensor.float() if tensor.itemsize == 1 else tensor  # torch has no arithmetic for types of one byte
    return (wide * factor).to(tensor.dtype)


def is_mask(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds flags: booleans, zeros and ones, or two floating values, one below -10,000 or -inf."""
    if tensor.dtype is torch.bool:
        return True
    if tensor.numel() == 0 or tensor.is_complex() or tensor.dim() == 0:
        return False
    if tensor.is_floating_point():
        low = float(tensor.float().min())
        return low < -1e4 and len(tensor.float().unique()) <= 2
    return bool(((tensor == 0) | (tensor == 1)).all()) and bool(tensor.any())


def _mask(example: torch.Tensor, generator: torch.Generator | None, turn: int) -> torch.Tensor:
    if example.dtype is torch.bool:
        low, high = torch.tensor(False), torch.tensor(True)
    elif example.is_floating_point():
        low, high = example.float().min().to(example.dtype), torch.zeros((), dtype=example.dtype)
    else:
        low, high = torch.zeros((), dtype=example.dtype), torch.ones((), dtype=example.dtype)
    length = example.shape[-1] if example.dim() else 1
    kept = torch.randint(1, max(2, length), (*example.shape[:-1], 1) if example.dim() else (), generator=generator)
    places = torch.arange(length) if example.dim() else torch.tensor(0)
    match turn % 4 if example.dim() else 3:
        case 0:
            flags = places < kept
        case 1:
            flags = places >= length - kept
        case 2:
            flags = torch.randint(0, 2, example.shape, generator=generator).bool()
        case _:
            flags = (
                torch.ones(example.shape, dtype=torch.bool)
                if example.dim()
                else torch.rand((), generator=generator) < 0.5
            )
    return torch.where(flags.expand(example.shape), high, low)
