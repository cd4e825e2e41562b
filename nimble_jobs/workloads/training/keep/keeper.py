"""Takes checkpoints while the training continues: copies the state at once, and has a thread write the files later.

If the disk is full or read-only for a while, that thread waits. The training runs until the next checkpoint is due.

Nothing waits for the device. A copy is written once the figures of all its steps have arrived and are finite.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from nimble_jobs.errors import JobFailed
from nimble_jobs.patience import NONE, Patience
from nimble_jobs.spec import CheckpointSpec
from nimble_jobs.workloads.training.gauge.figures import Steps
from nimble_jobs.workloads.training.keep.checkpoint import MODEL, STEPS, Checkpoints
from nimble_jobs.workloads.training.keep.flat import Flat
from nimble_jobs.workloads.training.keep.state import Progress, State, random_states


@dataclass(frozen=True, kw_only=True)
class _Taken:
    """A copy of the state that is not being written yet."""

    step: int
    sheet: dict[str, Any]
    best: int | None  # step of the best epoch so far


class Keeper:
    """Takes the checkpoints of one training and writes them, one at a time. A failure is raised by the next call.

    If the spec asks for no checkpoints, nothing is due and nothing is taken.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        state: State,
        spec: CheckpointSpec | None,
        sheet: Mapping[str, Any],
        *,
        latest: int | None = None,
        patience: Patience = NONE,
    ) -> None:
        """`sheet` is what all checkpoints of this attempt say; `latest` is the step of the one that it resumed from.

        Raises ModelError for a state that checkpoints cannot hold.
        """
        self._checkpoints = checkpoints
        self._state = state
        self._spec = spec
        self._sheet = sheet
        self._patience = patience
        self._trained = list(state.trained)
        kept = state.tensors() if spec is not None else {}
        self._flats = {name: Flat(tensors, state.device) for name, tensors in kept.items()}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nimble-checkpoint")
        self._due = False  # by steps, and not taken yet
        self._waiting: _Taken | None = None
        self._writing: Future[None] | None = None
        self._taken: tuple[int, int] | None = None
        self.latest = latest  # step of the newest one on the disk
        self.written = 0
        self.stalled_s = 0.0  # how long the training waited

    @property
    def path(self) -> Path | None:
        """The path of the newest checkpoint on the disk."""
        return None if self.latest is None else self._checkpoints.path(self.latest)

    def due_after_step(self, step: int, *, end: bool) -> bool:
        """Whether a checkpoint is due; at the `end` of an epoch `due_after_epoch` decides. Raises an error of the last
        write.
        """
        busy, every = self._busy(), self._spec.every_steps if self._spec is not None else None
        self._due = self._due or (every is not None and step % every == 0)
        return self._due and not end and not busy

    def due_after_epoch(self, epoch: int) -> bool:
        """Whether a checkpoint is due after an epoch that is not the last. Raises what writing raised."""
        every = self._spec.epochs if self._spec is not None else None
        by_steps = self._due and not self._busy()  # if busy, it is taken after a later step
        return by_steps or (every is not None and epoch % every == 0)

    def take(self, progress: Progress, random: Mapping[str, Any] | None = None) -> None:
        """Wait until the previous checkpoint is written, then copy the current state, unless it is kept already.

        `random` is the state of the random generators, if it is more than this process's.
        The first `write` with the figures of all its steps begins to write it.
        """
        start = time.perf_counter()
        self.settle()
        self._due = False
        if self._taken == (progress.step, progress.epoch):
            return
        assert self._waiting is None
        self._taken = (progress.step, progress.epoch)
        for name, tensors in self._state.tensors().items():
            self._flats[name].take(tensors)
        best = progress.best["step"] if progress.best else None
        sheet = {**self._sheet, "progress": asdict(progress), "random": random or random_states(self._state.device)}
        self._waiting = _Taken(step=progress.step, sheet=sheet, best=best)
        self.stalled_s += time.perf_counter() - start

    def write(self, steps: Steps) -> None:
        """Begin to write the copy, if `steps` holds the figures of all its steps. All of them must be finite."""
        taken = self._waiting
        if taken is None or len(steps) < taken.step:
            return
        self._waiting = None
        self._writing = self._thread.submit(self._write, taken, steps.tensors(taken.step))

    def settle(self) -> None:
        """Wait until the checkpoint that is being written is on the disk. Raises the error of its write."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """End the thread, once it has finished its current write."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _busy(self) -> bool:
        """Whether a checkpoint is being written or waits for figures. Raises the error of the last write."""
        if self._writing is None:
            return self._waiting is not None
        if not self._writing.done():
            return True
        self.settle()
        return False

    def _write(self, taken: _Taken, figures: dict[str, torch.Tensor]) -> None:
        assert self._spec is not None
        keep_last = self._spec.keep_last
        data = {name: flat.values() for name, flat in self._flats.items()}
        broken = self._flats[MODEL].not_finite(self._trained)
        if broken is not None:
            raise JobFailed(
                f"the weights {broken} are not finite after step {taken.step}; no checkpoint of them is kept"
            )
        files = {name: (self._flats[name].head, values) for name, values in data.items()} | {STEPS: (save(figures),)}
        self._patience.through(lambda: self._checkpoints.write(taken.step, taken.sheet, files))
        self.latest = taken.step
        self.written += 1
        self._patience.through(lambda: self._checkpoints.prune(taken.step, keep_last, taken.best))
