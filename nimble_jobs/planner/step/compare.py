"""Is a training step right? Values, gradients and statistics against those of eager, with the slack that sums and
rounding need.

A product in TF32 or a sixteen-bit type rounds its operands. Eager itself is asked what that does: it runs once more
with weights and input moved at random by as much. What another right implementation gives differs from eager's by about
as much (backward error analysis: N. Higham, Accuracy and Stability of Numerical Algorithms, chapter 1). In plain fp32
it is too little to matter, but for values next to an edge of a function, such as 0 for ReLU: there rounding decides
which of two gradients is right. A gradient that differs is then compared with those of several disturbed runs, and
must agree with one of them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable

import torch

from nimble_jobs.engine.device import multiplies_in_tf32
from nimble_jobs.engine.difference import in_double, relative_norm
from nimble_jobs.engine.memory import is_dense
from nimble_jobs.errors import CheckFailed
from nimble_jobs.planner.step.request import Tensors

# Gradients add up over the batch and pass through every layer: where eager's own order of additions is changed they
# move by more than the outputs do.
GRADIENT_SLACK = 10.0
NOISE = 1e-3  # gradients below this share of the largest, by root mean square, are rounding errors of zero
_MARGIN = 3.0  # how many times eager's own noise a right gradient may differ from it
_VALUES_TELL = 0.7  # above this allowed relative norm, only a tensor's size says whether it is right
_SIZES = 2.0  # by which factor sizes may differ then
ROUNDINGS = 16.0  # weights and input are disturbed by so many rounding errors, in place of every operator
_NEIGHBOURS = 24  # disturbed runs with which a gradient is compared, at most
_EDGES_MOVE = 0.2  # the largest relative norm that a few values next to an edge are held to explain


def compare(name: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float, floor: float) -> float:
    """The relative norm of the difference; for what is around zero, relative to the floor instead.

    Raises CheckFailed, with the name, above the tolerance.
    """
    error = relative_norm(found, expected)
    if math.isfinite(error) and rms(expected) < floor:
        error *= rms(expected) / floor
    elif not math.isfinite(error) and floor and not bool(expected.any()) and bool(torch.isfinite(found).all()):
        error = rms(found) / floor
    if not error <= tolerance:
        raise CheckFailed(
            f"{name!r} differs from eager by a relative norm of {error:.3g}; the tolerance is {tolerance:.3g}",
            error=error if math.isfinite(error) else None,
        )
    return error


def rms(tensor: torch.Tensor) -> float:
    """Root mean square."""
    return float(in_double(tensor).norm()) / math.sqrt(max(1, tensor.numel()))


def copies(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Copies of tensors, to put back later."""
    return {n: t.detach().clone() for n, t in tensors.items()}


def put(tensors: Tensors, values: Tensors) -> None:
    """Write values into tensors, by name; one whose shape was changed gets its own back."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            if is_dense(tensor) and tensor.shape != values[name].shape:
                tensor.data = values[name].clone()
            else:
                tensor.copy_(values[name])


def unit_roundoff(dtypes: Iterable[torch.dtype], device: torch.device) -> float:
    """The largest relative error of rounding to the narrowest of the floating types, or to TF32 if that is on."""
    kinds = [d for d in dtypes if d.is_floating_point] or [torch.float32]
    if multiplies_in_tf32(device):
        kinds.append(torch.float16)  # as many bits
    return max(torch.finfo(kind).eps for kind in kinds) / 2


def matters(unit: float) -> bool:
    """Whether a type rounds so much that gradients may show it."""
    return unit > torch.finfo(torch.float32).eps


def disturb(tensors: Iterable[torch.Tensor], unit: float, seed: int) -> None:
    """Move floating-point values in place by up to `unit` of themselves, or by one unit in the last place if their type
    is no finer.
    """
    generators: dict[torch.device, torch.Generator] = {}
    with torch.no_grad():
        for tensor in tensors:
            if not tensor.is_floating_point():
                continue
            place = tensor.device
            if place not in generators:
                generators[place] = torch.Generator(place).manual_seed(seed)
            share = max(unit, torch.finfo(tensor.dtype).eps)
            dtype = torch.promote_types(tensor.dtype, torch.float32)  # in fp32 a rounding of fp64 would be lost
            drawn = torch.rand(tensor.shape, generator=generators[place], device=place, dtype=dtype)
            factors = 1 + share * (2 * drawn - 1)
            tensor.copy_(tensor.to(factors.dtype) * factors)


def largest(norms: Iterable[Callable[[], float]]) -> float:
    """The largest relative norm, 0 if there is none. Each may raise CheckFailed; raises that with the largest error."""
    worst, refused = 0.0, list[CheckFailed]()
    for norm in norms:
        try:
            worst = max(worst, norm())
        except CheckFailed as e:
            refused.append(e)
    if refused:
        raise max(refused, key=lambda e: math.inf if e.error is None else e.error)
    return worst


def near_eager(refused: CheckFailed, neighbour: Callable[[int], float]) -> float:
    """The relative norm that the first of several disturbed runs of eager leaves, after `refused` gradients, of which
    the largest difference is known.

    `neighbour` makes the run of this number, and raises CheckFailed if what was found is not like it, by the slack that
    a run that is not disturbed allows. All tensors must be like those of the same run, so nothing passes that eager
    would not compute from weights and input that round to these. Raises `refused` if none is like it.
    """
    if refused.error is None or refused.error > _EDGES_MOVE:
        raise refused
    for number in range(_NEIGHBOURS):
        with contextlib.suppress(CheckFailed):
            return neighbour(number)
    raise refused


def noise_of(found: Tensors, expected: Tensors) -> dict[str, float]:
    """The relative norm of the disturbed run's difference, by name; 0 if it cannot be computed."""
    norms = {name: relative_norm(tensor, expected[name]) for name, tensor in found.items()}
    return {name: norm if math.isfinite(norm) else 0.0 for name, norm in norms.items()}


def allowed_norm(tolerance: float, noise: float) -> float:
    """The relative norm by which values may differ if rounding alone moves them by `noise`: at least `tolerance`, and
    never so much that the comparison would say nothing.
    """
    return max(tolerance, min(_MARGIN * noise, _VALUES_TELL))


def compare_gradient(
    name: str, found: torch.Tensor, expected: torch.Tensor, slack: float, floor: float, noise: float
) -> float:
    """As `compare`, with `slack` or, if that is more, what `noise` allows; 0 if only sizes can be compared.

    `noise` is relative to `expected`, even if that is below the floor. Raises CheckFailed, naming the tensor.
    """
    size = rms(expected)
    allowed = _MARGIN * noise
    if size <= floor:
        return compare(name, found, expected, max(slack, allowed * size / floor if floor else 0.0), floor)
    if allowed < max(slack, _VALUES_TELL):
        return compare(name, found, expected, max(slack, allowed), floor)
    ratio = rms(found) / size
    if not 1 / _SIZES <= ratio <= _SIZES:
        raise CheckFailed(
            f"{name!r} is {ratio:.3g} times as large as in eager; "
            f"rounding alone moves it by a relative norm of {noise:.3g}"
        )
    return 0.0
