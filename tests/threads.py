"""A device made of threads: one for each stream of a bound program, with an event for each task."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch

from nimble_jobs.engine.bind import Bound, Env, Step
from nimble_jobs.schedule import BufferKind, Program, Sync

PATIENCE_S = 60.0  # after which a wait is taken for a deadlock
_NONE: Mapping[int, float] = MappingProxyType({})
_NO_HOLD: Mapping[int, int] = MappingProxyType({})


@dataclass(kw_only=True)
class Run:
    """One run in progress."""

    env: Env
    finished: dict[int, threading.Event]
    delays_s: Mapping[int, float]
    hold: Mapping[int, int]
    order: list[int] = field(default_factory=list)  # of the tasks, as they ended
    failures: list[BaseException] = field(default_factory=list)

    def lane(self, steps: list[Step]) -> None:
        """What one thread does."""
        try:
            with torch.no_grad():
                for step in steps:
                    self.await_turn(step)
                    if self.failures:
                        return
                    for buffer in step.drops:
                        overwrite(self.env.pop(buffer))
                    step.call(self.env)
                    self.order.append(step.task)
                    self.finished[step.task].set()
        except BaseException as e:  # noqa: BLE001  # raised by the caller of the threads
            self.failures.append(e)
            for event in self.finished.values():
                event.set()

    def await_turn(self, step: Step) -> None:
        others = [self.hold[step.task]] if step.task in self.hold else []
        for task in (*step.waits, *others):
            if not self.finished[task].wait(PATIENCE_S):
                raise TimeoutError(f"task {task} does not end")
        if step.task in self.delays_s:
            time.sleep(self.delays_s[step.task])


def run_by_threads(
    bound: Bound, *, delays_s: Mapping[int, float] = _NONE, hold: Mapping[int, int] = _NO_HOLD
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """The outputs, and the tasks in the order in which they ended.

    A task starts `delays_s` late, and a task in `hold` once the one that is named there has ended. A buffer that is let
    go of is overwritten at once, as by whoever is given its bytes next. Raises what the first thread did.
    """
    finished = {step.task: threading.Event() for step in bound.steps}
    run = Run(env=dict(bound.fixed), finished=finished, delays_s=delays_s, hold=hold)
    lanes: dict[int, list[Step]] = {}
    for step in bound.steps:
        lanes.setdefault(step.stream, []).append(step)
    threads = [threading.Thread(target=run.lane, args=(steps,)) for steps in lanes.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if run.failures:
        raise run.failures[0]
    return {name: tensor.clone() for name, tensor in bound.results(run.env).items()}, run.order


def random_delays(bound: Bound, dice: random.Random) -> dict[int, float]:
    """Up to a fifth of a millisecond for every fourth task or so."""
    return {step.task: dice.uniform(0.0, 2e-4) for step in bound.steps if dice.random() < 0.25}


def overwrite(tensor: torch.Tensor) -> None:
    """Set every bit of the storage behind a tensor, which makes NaN of floating numbers."""
    storage = tensor.untyped_storage()
    torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage).fill_(255)


def overwrite_intermediates(bound: Bound, program: Program) -> None:
    """Leave nothing of an earlier run in the arena and in outputs."""
    for buffer in program.buffers:
        if buffer.kind is BufferKind.INTERMEDIATE and buffer.index in bound.fixed:
            overwrite(bound.fixed[buffer.index])


def without(bound: Bound, sync: Sync) -> Bound:
    """The same launches without one of the waits."""
    return replace(
        bound,
        steps=tuple(
            replace(s, waits=tuple(t for t in s.waits if t != sync.before)) if s.task == sync.after else s
            for s in bound.steps
        ),
    )


def syncs_of(bound: Bound) -> Iterator[Sync]:
    """Every wait that is launched."""
    for step in bound.steps:
        for task in step.waits:
            yield Sync(before=task, after=step.task)
