"""The state that an update leaves, compared with eager's: weights, statistics, and the optimizer's tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial

from nimble_jobs.planner.step.compare import GRADIENT_SLACK, NOISE, compare, compare_gradient, largest, rms
from nimble_jobs.planner.step.reduction import TURN, WEIGHT
from nimble_jobs.planner.step.request import Tensors

_EPS = 2.0**-23
_NO_SLOTS = {"@lr", "@scaler.scale", "@scaler.growth_tracker", WEIGHT, TURN}
_MOVES = 0.1  # share of a batch's mean in the running mean, by default


def compare_learnt(
    moved: Tensors,
    live: Tensors,
    before: Tensors,
    expected: Tensors,
    tolerance: float,
    noise: Mapping[str, float],
) -> float:
    """The largest relative norm in what gradients change. Raises CheckFailed, naming the tensor that differs most.

    Weights are compared by how far they `moved` in eager, the optimizer's tensors with those in `expected`.
    """
    slack = tolerance * GRADIENT_SLACK
    usual = max((rms(t) for t in moved.values()), default=0.0)
    slots = slots_of(live)
    of_slots = _largest_by_kind(expected, slots)

    def of_weight(name: str) -> float:
        floor = max(NOISE * usual, 4 * _EPS * rms(before[name]) / slack)  # the weight itself is rounded, too
        found = live[name].detach() - before[name]
        return compare_gradient(name, found, moved[name], slack, floor, noise.get(name, 0.0))

    def of_slot(name: str) -> float:
        floor, plain = NOISE * of_slots[_kind(name)], name.removeprefix("@")
        return compare_gradient(plain, live[name], expected[name], slack, floor, noise.get(name, 0.0))

    return largest([*(partial(of_weight, name) for name in moved), *(partial(of_slot, name) for name in slots)])


def compare_others(parameters: Collection[str], live: Tensors, expected: Tensors, tolerance: float) -> float:
    """The largest relative norm in all other state, such as statistics. Raises CheckFailed, naming the tensor."""
    others = [n for n in live if n not in parameters and (not n.startswith("@") or n in _NO_SLOTS)]
    of_buffers = _largest_by_kind(expected, (n for n in others if not n.startswith("@")))
    worst = 0.0
    for name in others:
        floor = 0.0 if name.startswith("@") else _floor_of_buffer(name, expected, of_buffers)
        worst = max(worst, compare(name.removeprefix("@"), live[name], expected[name], tolerance, floor))
    return worst


def slots_of(live: Tensors) -> list[str]:
    """Names of the optimizer's tensors."""
    return [n for n in live if n.startswith("@") and n not in _NO_SLOTS]


def floors_of(state: Tensors, parameters: Collection[str], size: float) -> dict[str, float]:
    """For each value compared after an update, by name: the root mean square below which it counts as zero."""
    names = [n for n in state if not n.startswith("@")]
    of_buffers = _largest_by_kind(state, (n for n in names if n not in parameters))
    return {n: size if n in parameters else _floor_of_buffer(n, state, of_buffers) for n in names}


def _floor_of_buffer(name: str, expected: Tensors, largest: Mapping[str, float]) -> float:
    """The root mean square below which a buffer's values may be rounding errors of zero.

    Means are measured by the spread of what they are the means of: behind a norm and a linear layer they are exactly 0.
    """
    if not expected[name].is_floating_point():
        return 0.0
    if _kind(name) == "running_mean":
        spread = expected.get(f"{name.removesuffix('mean')}var")
        if spread is not None:
            return _MOVES * rms(spread.clamp(min=0.0).sqrt())
    return NOISE * largest[_kind(name)]


def _largest_by_kind(tensors: Tensors, names: Iterable[str]) -> dict[str, float]:
    """The largest root mean square among the tensors of each kind."""
    found: dict[str, float] = {}
    for name in names:
        found[_kind(name)] = max(found.get(_kind(name), 0.0), rms(tensors[name]))
    return found


def _kind(name: str) -> str:
    """What a tensor is in its layer."""
    return name.rpartition(".")[2]
