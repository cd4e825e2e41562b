"""Captures a training step together with the other ranks, and checks that its replays sum over all of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nimble_jobs.engine.capture import Instance
from nimble_jobs.errors import CaptureFailed, CheckFailed, NoJointReplay
from nimble_jobs.planner.keys.roles import Role
from nimble_jobs.planner.module.limits import numbers_for
from nimble_jobs.planner.step.check import check_update, fresh_batch
from nimble_jobs.planner.step.compare import copies, put
from nimble_jobs.planner.step.eager import state_of_step
from nimble_jobs.planner.step.live import Capturable, LiveStep
from nimble_jobs.planner.step.reduction import Peers

_SEED = 17
_PIECE = 1 << 20  # values of a tensor that are digested at a time
_FACTOR = 0x100000001B3  # odd, so that no bit is lost


def capture_jointly(live: LiveStep, programs: Mapping[Role, Capturable], peers: Peers) -> dict[Role, Instance]:
    """Capture and check all programs. Every rank runs the same collectives, whatever a capture or the check finds.

    The values are then as they were at first. Raises NoJointReplay on all ranks. After any other error this rank must
    leave the others at once, since they may wait for its sums: EngineError, OutOfMemory, RankLost, and whatever the
    step's operators raise.
    """
    reduction = live.eager.arithmetic.reduction
    assert reduction is not None
    reduction.weight.fill_(1.0 / reduction.count)
    instances: dict[Role, Instance] = {}
    try:
        for role in live.request.programs:
            failure = ""
            try:
                instances |= live.capture({role: programs[role]})
            except CaptureFailed as e:  # its trial run has summed, so the other ranks get as far as `_agree` too
                failure = str(e)
            _agree(failure, peers)
        _agree(_disagreement(live, instances, peers), peers)
    except BaseException:
        for instance in instances.values():
            instance.close()
        raise
    finally:
        live.restore()
    return instances


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """A number for each floating tensor's bits in their places: equal for equal tensors, whatever their layout in
    memory, and nearly always different otherwise.
    """
    floating = {name: _digest(t.detach()) for name, t in tensors.items() if t.is_floating_point() and t.numel()}
    return dict(zip(floating, torch.stack([*floating.values()]).tolist(), strict=True)) if floating else {}


def differing(found: list[dict[str, int]]) -> str | None:
    """The first tensor whose digest is not the same on all ranks; None if there is none."""
    return next((name for name in found[0] if any(other.get(name) != found[0][name] for other in found[1:])), None)


def _disagreement(live: LiveStep, instances: Mapping[Role, Instance], peers: Peers) -> str:
    """Train on this rank's own batches, in eager and replayed. Returns what is wrong with the replay, or ""."""
    eager, inputs = live.eager, live.inputs
    state = state_of_step(eager.arithmetic, {})
    below, rank = numbers_for(eager.arithmetic.objective.module), peers.rank
    batches = [fresh_batch(copies(inputs), below, _SEED + peers.count * i + rank, i) for i in range(len(instances))]
    before = copies(state)
    failure = ""
    try:
        check_update(
            eager, instances, inputs, batches, live.device, tolerance=live.tolerance, seed=_SEED, ranks=peers.count
        )
    except CheckFailed as e:
        failure = f"summed over all ranks, {e}"
    apart = differing(peers.gather(digests(state)))
    put(state, before)
    return failure or (f"after an update, {apart!r} is not the same on all ranks" if apart is not None else "")


def _agree(failure: str, peers: Peers) -> None:
    """Raises NoJointReplay on all ranks if there is a failure on one."""
    for rank, text in enumerate(peers.gather(failure)):
        if text:
            raise NoJointReplay(f"rank {rank}: {text}")


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in tensor.contiguous().view(bits).reshape(-1).split(_PIECE):  # all of it in int64 may be too much memory
        places = torch.arange(1, 2 * piece.numel(), 2, device=tensor.device)
        total = total * _FACTOR + (piece.long() * places).sum()
    return total
