"""Checkpoints of a training on several ranks: the first one writes them, and all of them agree when."""

from __future__ import annotations

from pathlib import Path

from nimble_jobs.errors import JobFailed
from nimble_jobs.planner.step.joint import differing, digests
from nimble_jobs.workloads.training.gauge.figures import Steps
from nimble_jobs.workloads.training.keep.keeper import Keeper
from nimble_jobs.workloads.training.keep.state import OTHER_RANKS, Progress, State, random_states
from nimble_jobs.workloads.training.ranks.gang import Gang


class SharedKeeper:
    """A keeper as each rank has it. Only the leader's holds one that writes."""

    def __init__(self, gang: Gang, state: State, keeper: Keeper | None) -> None:
        """`keeper` is the leader's; the others have none."""
        self._gang, self._state, self._keeper = gang, state, keeper

    @property
    def latest(self) -> int | None:
        """As the leader's keeper has it."""
        return None if self._keeper is None else self._keeper.latest

    @property
    def path(self) -> Path | None:
        """As the leader's keeper has it."""
        return None if self._keeper is None else self._keeper.path

    def due_after_step(self, step: int, *, end: bool) -> bool:
        """As the leader's keeper decides."""
        keeper = self._keeper
        return bool(self._gang.agree(lambda: keeper is not None and keeper.due_after_step(step, end=end)))

    def due_after_epoch(self, epoch: int) -> bool:
        """As the leader's keeper decides."""
        keeper = self._keeper
        return bool(self._gang.agree(lambda: keeper is not None and keeper.due_after_epoch(epoch)))

    def take(self, progress: Progress) -> None:
        """Have the leader copy its state, with the random states of all ranks. Raises JobFailed as `check_same`."""
        check_same(self._gang, self._state, progress.step)
        first, *others = self._gang.gather(random_states(self._state.device))
        if self._keeper is not None:
            self._keeper.take(progress, {**first, OTHER_RANKS: others})

    def write(self, steps: Steps) -> None:
        """As `Keeper.write`, on the leader."""
        if self._keeper is not None:
            self._keeper.write(steps)

    def settle(self) -> None:
        """As `Keeper.settle`, on the leader."""
        if self._keeper is not None:
            self._keeper.settle()


def check_same(gang: Gang, state: State, step: int) -> None:
    """Raises JobFailed on all ranks if weights, statistics or the optimizer's state differ between them."""
    tensors = {name: t for part in state.tensors().values() for name, t in part.items()}
    apart = differing(gang.gather(digests(tensors)))
    if apart is not None:
        raise JobFailed(
            f"run.gpus: {apart} is not the same on all ranks after step {step}; with several devices, calls of the "
            "model may change nothing but statistics of normalisations; expected 1"
        )
