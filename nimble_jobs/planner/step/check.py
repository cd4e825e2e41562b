"""Is a captured training step right? Updates on fresh batches, compared with eager's from the same state.

What is compared: loss, running statistics, the optimizer's state, and how far each weight moved, as far as rounding
leaves that defined (see `compare`). The learning rate is 1, and Adam's second moments are what gradients of usual size
would have left. Updates are then smooth in the gradients; a first step of Adam shows only their signs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from nimble_jobs.engine import verify
from nimble_jobs.engine.capture import Instance
from nimble_jobs.engine.device import seed as seed_all
from nimble_jobs.engine.device import synchronize
from nimble_jobs.engine.inputs import Below, draw
from nimble_jobs.errors import CheckFailed
from nimble_jobs.packing import Layout
from nimble_jobs.planner.keys.roles import Role
from nimble_jobs.planner.module.limits import numbers_for
from nimble_jobs.planner.step.compare import (
    NOISE,
    ROUNDINGS,
    allowed_norm,
    compare,
    copies,
    disturb,
    matters,
    near_eager,
    noise_of,
    put,
    rms,
    unit_roundoff,
)
from nimble_jobs.planner.step.eager import EagerStep, state_of_step
from nimble_jobs.planner.step.request import Tensors
from nimble_jobs.planner.step.states import compare_learnt, compare_others, floors_of, slots_of

_STEPS_BEFORE = 10.0  # for Adam's bias corrections
_HALVINGS = 24  # of the loss scale, at most, until gradients are finite
_FLIPS = 0.05  # share of a batch whose best class may change where two scores are nearly equal
_UPDATES = 3  # of a course, one after another
_SAMPLES = 3  # of a course in eager, disturbed by rounding errors
_SHARE_MOVED = 0.02  # of the weights' size, by each update of a course

Batch = tuple[torch.Tensor, torch.Tensor]
Updated = tuple[Sequence[torch.Tensor], Tensors]  # the losses of its batches, and the state that it leaves


def check_step(
    eager: EagerStep,
    instances: Mapping[Role, Instance],
    inputs: Mapping[str, torch.Tensor],
    device: torch.device,
    *,
    tolerance: float,
    seed: int,
) -> float:
    """The largest relative norm of a difference. Changes weights, statistics, state and inputs; the caller restores.

    Random masks are compared too: both sides draw from the same seed. Raises CheckFailed, naming the tensor.
    """
    arithmetic = eager.arithmetic
    live = state_of_step(arithmetic, {})
    examples = copies(inputs)
    fresh = partial(fresh_batch, examples, numbers_for(arithmetic.objective.module))
    worst = 0.0
    lr = 0.0
    for turn in range(verify.ROUNDS):
        batches = [fresh(seed + 7 * turn + i, turn) for i in range(len(instances))]
        error, before, expected = check_update(
            eager, instances, inputs, batches, device, tolerance=tolerance, seed=seed + turn
        )
        worst = max(worst, error)
        lr = _small_rate(arithmetic.parameters, before, expected)
    put(live, before)
    arithmetic.optimizer.lr.fill_(lr)
    updates = [[fresh(seed - 1 - i * len(instances) - j, i) for j in range(len(instances))] for i in range(_UPDATES)]
    return max(worst, _compare_course(eager, instances, inputs, live, updates, device, tolerance=tolerance, seed=seed))


def check_update(
    eager: EagerStep,
    instances: Mapping[Role, Instance],
    inputs: Mapping[str, torch.Tensor],
    batches: Sequence[Batch],  # one for each instance
    device: torch.device,
    *,
    tolerance: float,
    seed: int,
    ranks: int = 1,
) -> tuple[float, Tensors, Tensors]:
    """The largest relative norm in losses and state after one update, and the state before it and after eager's.

    Changes weights, statistics, state and inputs. Several ranks that call this at once, with the same seed, run the
    same sums, whatever each of them finds. Raises CheckFailed, naming the tensor, after the last sum.
    """
    arithmetic = eager.arithmetic
    live = state_of_step(arithmetic, {})
    arithmetic.optimizer.lr.fill_(1.0)
    seed_all(seed, device)
    _prepare_slots(eager, live, batches, seed, device)
    before = copies(live)
    seed_all(seed, device)
    losses, correct = _in_eager(eager, batches)
    expected = copies(live)
    put(live, before)
    noise = _noise(eager, live, batches, expected, seed, device)
    put(live, before)
    seed_all(seed, device)
    replayed, counts = _replayed(instances, inputs, batches, device, poison=True)
    worst = max(compare("loss", *pair, tolerance, 0.0) for pair in zip(replayed, losses, strict=True))
    for (_, y), count, wanted in zip(batches, counts, correct, strict=True):
        flips = abs(int(count) - int(wanted))
        if flips > 1 + _FLIPS * y.shape[0] * ranks:
            raise CheckFailed(f"the number of records classified correctly differs from eager's by {flips}")
    worst = max(worst, compare_others(arithmetic.parameters, live, expected, tolerance))
    moved = {n: expected[n] - before[n] for n in arithmetic.parameters}
    found = copies(live)
    try:
        error = compare_learnt(moved, found, before, expected, tolerance, noise)
    except CheckFailed as refused:
        unit = unit_roundoff([arithmetic.objective.computes_in], device)
        if matters(unit) or ranks > 1:  # all ranks would have to repeat it
            raise

        def neighbour(number: int) -> float:
            put(live, before)
            moved = _disturbed(eager, live, batches, ROUNDINGS * unit, seed + number, seed, device)
            return compare_learnt(moved, found, before, live, tolerance, {})

        error = near_eager(refused, neighbour)
        put(live, found)
    return max(worst, error), before, expected


def _compare_course(
    eager: EagerStep,
    instances: Mapping[Role, Instance],
    inputs: Mapping[str, torch.Tensor],
    live: Tensors,
    batches: Sequence[Sequence[Batch]],  # of each update
    device: torch.device,
    *,
    tolerance: float,
    seed: int,
) -> float:
    """The largest relative norm over several updates in a row, so that each sees what the one before left behind.

    Loss, statistics and weights are compared, from the same start. If they differ by more than the tolerance, eager
    repeats the course, disturbed by rounding errors, which some networks amplify a thousandfold with each update.
    Differences of that size are then allowed. Raises CheckFailed, naming the tensor.
    """
    start = copies(live)

    def course(
        step: Callable[[Sequence[Batch]], list[torch.Tensor]], updates: Sequence[Sequence[Batch]]
    ) -> list[Updated]:
        found: list[Updated] = []
        for i, parts in enumerate(updates):
            seed_all(seed + i, device)
            found.append((step(parts), copies(live)))
        put(live, start)
        return found

    def in_eager(parts: Sequence[Batch]) -> list[torch.Tensor]:
        return _in_eager(eager, parts)[0]

    expected = course(in_eager, batches)
    found = course(lambda parts: _replayed(instances, inputs, parts, device)[0], batches)
    parameters = list(eager.arithmetic.parameters)
    size = max((rms(start[n]) for n in parameters), default=0.0)
    floors = [floors_of(state, parameters, size) for _, state in expected]
    try:
        return max(
            _compare_update(i, *pair, floors[i], tolerance) for i, pair in enumerate(zip(found, expected, strict=True))
        )
    except CheckFailed:
        noise = [0.0] * len(expected)
    unit = ROUNDINGS * unit_roundoff([eager.arithmetic.objective.computes_in], device)
    for sample in range(_SAMPLES):
        other = [[(x.clone(), y) for x, y in parts] for parts in batches]
        disturb([*(live[n] for n in parameters), *(x for parts in other for x, _ in parts)], unit, seed + sample)
        disturbed = course(in_eager, other)
        for i, pair in enumerate(zip(disturbed, expected, strict=True)):
            with contextlib.suppress(CheckFailed):  # not finite
                noise[i] = max(noise[i], _compare_update(i, *pair, floors[i], math.inf))
    return max(
        _compare_update(i, *pair, floors[i], allowed_norm(tolerance, noise[i]))
        for i, pair in enumerate(zip(found, expected, strict=True))
    )


def _replayed(
    instances: Mapping[Role, Instance],
    inputs: Mapping[str, torch.Tensor],
    batches: Sequence[Batch],
    device: torch.device,
    *,
    poison: bool = False,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Replay each program on its batch; their losses, and how many were classified correctly."""
    losses, correct = [], []
    for (x, y), instance in zip(batches, instances.values(), strict=True):
        inputs["x"].copy_(x)
        inputs["y"].copy_(y)
        if poison:
            verify.poison(instance)
        instance.replay()
        synchronize(device)
        losses.append(instance.outputs["loss"].clone())
        correct.append(instance.outputs["correct"].clone())
    return losses, correct


def _compare_update(i: int, found: Updated, expected: Updated, floors: Mapping[str, float], tolerance: float) -> float:
    """The largest relative norm in losses and state. Raises CheckFailed, naming the tensor, above the tolerance."""
    losses = zip(found[0], expected[0], strict=True)
    norms = [compare(f"loss of update {i + 1}", *pair, tolerance, 0.0) for pair in losses]
    norms += [
        compare(f"{n} after update {i + 1}", found[1][n], expected[1][n], tolerance, floor)
        for n, floor in floors.items()
    ]
    return max(norms, default=0.0)


def _small_rate(parameters: Tensors, before: Tensors, expected: Tensors) -> float:
    """A learning rate at which an update changes outputs, and weights by a small share."""
    moved = max((rms(expected[n] - before[n]) for n in parameters), default=0.0)
    size = max((rms(before[n]) for n in parameters), default=0.0)
    return min(1.0, _SHARE_MOVED * size / moved) if moved else 0.0


def _in_eager(eager: EagerStep, batches: Sequence[Batch]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Train on batches, the last with an update; their losses, and how many were classified correctly."""
    losses, correct = [], []
    for i, (x, y) in enumerate(batches):
        eager.run_batch(x, y, update=i == len(batches) - 1)
        losses.append(eager.loss.clone())
        correct.append(eager.correct.clone())
    return losses, correct


def _prepare_slots(eager: EagerStep, live: Tensors, batches: Sequence[Batch], seed: int, device: torch.device) -> None:
    """Set the optimizer's state so that an update shows errors best; lower the loss scale until nothing overflows."""
    optimizer = eager.arithmetic.optimizer
    before = copies(live)
    for _ in range(_HALVINGS):
        for slots in optimizer.slots.values():
            for tensor in slots.values():
                tensor.zero_()
        seed_all(seed, device)
        _in_eager(eager, batches)
        if optimizer.scale is None or not bool(eager.found_inf):
            break
        before["@scaler.scale"] /= 2
        put(live, before)
    squares = {n: float(t.mean()) for n, t in optimizer.slots.get("exp_avg_sq", {}).items()}
    put(live, before)
    for slots in optimizer.slots.values():
        for tensor in slots.values():
            tensor.zero_()
    usual = max(squares.values(), default=0.0)
    beta = optimizer.recipe.betas[1]
    for name, square in squares.items():
        optimizer.slots["exp_avg_sq"][name].fill_(max(square, NOISE**2 * usual) / (1 - beta) or 1.0)
        optimizer.slots["step"][name].fill_(_STEPS_BEFORE)


def _noise(
    eager: EagerStep, live: Tensors, batches: Sequence[Batch], expected: Tensors, seed: int, device: torch.device
) -> dict[str, float]:
    """How far rounding alone moves each weight's update and each of the optimizer's tensors: relative norms by name."""
    unit = unit_roundoff([eager.arithmetic.objective.computes_in], device)
    if not matters(unit):
        return {}
    before = copies(eager.arithmetic.parameters)
    moved = _disturbed(eager, live, batches, unit, seed, seed, device)
    if eager.arithmetic.optimizer.scale is not None and bool(eager.found_inf):
        return {}  # the update was skipped, which says nothing about rounding
    noise = noise_of(moved, {n: expected[n] - before[n] for n in moved})
    return noise | noise_of({n: live[n] for n in slots_of(live)}, expected)


def _disturbed(
    eager: EagerStep,
    live: Tensors,
    batches: Sequence[Batch],
    unit: float,
    draw: int,
    seed: int,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """How far an update in eager moves weights that are disturbed by `unit` with their inputs, by name."""
    parameters = {n: live[n] for n in eager.arithmetic.parameters}
    other = [(x.clone(), y) for x, y in batches]
    disturb([*parameters.values(), *(x for x, _ in other)], unit, draw)
    start = copies(parameters)
    seed_all(seed, device)
    _in_eager(eager, other)
    return {n: t.detach() - start[n] for n, t in parameters.items()}


def fresh_batch(examples: Tensors, below: Below, seed: int, turn: int) -> Batch:
    """A batch like the example's: noise for floating types, integers and targets of the example in another order.

    Of rows that hold several inputs each input is drawn alone; `turn` selects the shape of the masks in them.
    """
    generator = torch.Generator().manual_seed(seed)
    x, y = examples["x"], examples["y"]
    if isinstance(below, Layout):
        new_x = draw(x.shape, x.dtype, below, generator=generator, turn=turn).to(x.device)
    elif x.is_floating_point():
        new_x = torch.empty_like(x).copy_(torch.randn(x.shape, generator=generator))
    else:
        new_x = x.flatten()[torch.randperm(x.numel(), generator=generator).to(x.device)].view(x.shape)
    return new_x, y[torch.randperm(y.shape[0], generator=generator).to(y.device)]
