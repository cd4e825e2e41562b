"""The program of every rank but the first: `python -m nimble_jobs.workloads.training.follower PIPE PARENT`.

It trains as the leader does, on its share of each batch and on its own device, and writes nothing. What it is to do
comes by its standard input, and what it says goes into the pipe (`ranks.followers`).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch

from nimble_jobs import spec as specs
from nimble_jobs.decoding.pool import Decoders
from nimble_jobs.device_errors import device_error, words
from nimble_jobs.engine import device as devices
from nimble_jobs.errors import CheckpointGone, Damaged, JobFailed, NimbleError
from nimble_jobs.models.pictures import with_model_transform
from nimble_jobs.orphans import die_with
from nimble_jobs.planner.jobs.ahead import KeepsNothing
from nimble_jobs.planner.keys.options import BuildOptions
from nimble_jobs.planner.keys.switches import as_in_training
from nimble_jobs.store import open_store
from nimble_jobs.workloads.context import JobContext, Stop
from nimble_jobs.workloads.training.attempt import Kinds, Ready, prepared, train
from nimble_jobs.workloads.training.batches.together import Share
from nimble_jobs.workloads.training.gauge.figures import Steps
from nimble_jobs.workloads.training.gauge.journal import Journal
from nimble_jobs.workloads.training.keep.checkpoint import read as read_checkpoint
from nimble_jobs.workloads.training.keep.shared import SharedKeeper, check_same
from nimble_jobs.workloads.training.keep.state import Progress, State, seed_random
from nimble_jobs.workloads.training.loop import Plan
from nimble_jobs.workloads.training.ranks.followers import Part, told_as
from nimble_jobs.workloads.training.ranks.gang import Gang
from nimble_jobs.workloads.training.session import Reading, read

_FAILED = 1

Say = Callable[[Mapping[str, Any]], None]
Hear = Callable[[], dict[str, Any]]


def main() -> int:
    """Be one rank of one attempt; the exit code. It never outlives the leader."""
    mouth, leader = int(sys.argv[1]), int(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM):  # the leader decides
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    die_with(leader)

    def say(line: Mapping[str, Any]) -> None:
        os.write(mouth, json.dumps(line).encode() + b"\n")

    try:
        with redirect_stdout(sys.stderr):  # a model's prints
            follow(_hear, say)
    except BaseException as e:
        logging.getLogger(__name__).warning("this rank ends", exc_info=e)
        _tell(say, e)
        return _FAILED
    return 0


def follow(hear: Hear, say: Say) -> None:
    """Train as a follower, from the first line that is heard to the end of the training."""
    part = Part(**hear())
    torch.set_num_threads(part.threads)
    with closing(open_store(Path(part.home), create=False)) as store, closing(Decoders()) as decoders:
        job = store.jobs.get(part.job)
        context = JobContext(
            job=job,
            spec=with_model_transform(specs.restore(job.spec)),
            device=part.device,
            store=store,
            residents=KeepsNothing(),
            stop=lambda: Stop.GO,
            report=lambda **_: None,
            event=lambda *_: None,
            allowed_python=tuple(Path(folder) for folder in job.allow_python),
            decoders=decoders,
        )
        take_part(part, context, hear, say)


def take_part(part: Part, context: JobContext, hear: Hear, say: Say) -> None:
    """Be a rank of the training in `context`. `hear` gives the leader's order. Raises as a job does."""
    device = devices.resolve(part.device)
    devices.make_current(device)
    with as_in_training(device), read(context, device) as reading:
        plan = Plan.of(context.spec, reading.data, share=Share(part.rank, part.count))

        def kinds(_: BuildOptions) -> Kinds:
            return ["eager"] if hear()["eager"] else []

        # What the leader has is stored, or could not be stored.
        with prepared(reading, kinds, on_miss="eager", team=_Team(part, say)) as ready:
            _train(reading, plan, ready)


class _Team:
    """How a follower comes together with the leader."""

    def __init__(self, part: Part, say: Say) -> None:
        self._part, self._say = part, say

    def meet(self, order: Mapping[str, Any], device: torch.device, check: Callable[[], None]) -> Gang:
        del order, check  # the leader's to give
        part = self._part
        self._say({"ready": True})
        return Gang.connect(Path(part.meeting), part.rank, part.count, device, timeout_s=part.timeout_s)

    @contextmanager
    def telling(self) -> Iterator[None]:
        try:
            yield
        except BaseException as e:
            _tell(self._say, e)
            raise


def _train(reading: Reading, plan: Plan, ready: Ready) -> None:
    gang, spec = ready.gang, reading.spec
    assert gang is not None
    state = State(ready.setup.module, ready.step, reading.device)
    progress, steps = Progress(), Steps()
    kept = gang.gather(None)[0]
    if kept is None:
        seed_random(spec.model.seed, reading.device, rank=gang.rank)
    else:
        try:
            progress, steps = state.restore(read_checkpoint(Path(kept)), rank=gang.rank)
        except Damaged as e:
            raise CheckpointGone(str(e)) from e
    check_same(gang, state, progress.step)
    nothing, silent = lambda **_: None, lambda *_: None
    classes = ready.setup.classes is not None
    journal = Journal(Path(os.devnull), steps, classes=classes, tensorboard=False, report=nothing, event=silent)
    with closing(journal):
        journal.replay(progress.epochs)
        train(reading, plan, ready, progress, journal, SharedKeeper(gang, state, None))


def _hear() -> dict[str, Any]:
    """The next line of the leader. Raises EOFError if it is gone."""
    line = sys.stdin.readline()
    if not line:
        raise EOFError("the leader is gone")
    heard: dict[str, Any] = json.loads(line)
    return heard


def _tell(say: Say, error: BaseException) -> None:
    """Tell the leader why this rank ends."""
    say({"error": told_as(_explained(error))})


def _explained(error: BaseException) -> NimbleError:
    known = device_error(error)
    if known is not None:
        return known
    return error if isinstance(error, NimbleError) else JobFailed(words(error))


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # without the interpreter's clean-up, which can hang on a device that does not answer
