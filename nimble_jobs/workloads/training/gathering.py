"""Starts the other ranks of a job, if it has any, each as a process of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nimble_jobs import moves
from nimble_jobs.workloads.context import JobContext
from nimble_jobs.workloads.training.ranks.followers import Followers
from nimble_jobs.workloads.training.ranks.places import Loan, places
from nimble_jobs.workloads.training.session import Session
from nimble_jobs.workloads.waiting import go_on

_LOOK_S = 0.1  # how often a job that waits for devices looks for them
_LONGEST_S = 1800.0  # for another rank, if nothing limits how long a job may stand still


@contextmanager
def started(session: Session, count: int) -> Iterator[Followers]:
    """The processes of the other ranks, which open the same data and load the same model meanwhile.

    Raises UsageError, JobFailed and Stopped as `places`; what a rank says of its failure takes the place of RankLost.
    """
    context, job = session.context, session.context.job
    with places(context.store, session.device, count, _loan(context)) as devices:
        text = f"trains on {count} devices: {', '.join(devices)}"
        context.event("ranks", text, {"devices": devices})
        with Followers.start(
            devices,
            timeout_s=_timeout_s(session),
            home=str(context.store.home),
            job=job.id,
            attempt=job.attempt,
            threads=torch.get_num_threads(),
        ) as followers:
            yield followers


def _loan(context: JobContext) -> Loan | None:
    """How the job borrows devices of its worker. An event says what it waits for."""
    if context.borrow is None or context.job.worker is None:
        return None
    told = False

    def wait(why: str) -> None:
        nonlocal told
        if not told:
            context.event("ranks", f"waits until its worker lends it other devices; at work, or about to be: {why}", {})
            context.report(phase="wait")
            told = True
        go_on(context)
        moves.made()  # however long the jobs on those devices take
        time.sleep(_LOOK_S)

    return Loan(job=context.job.id, worker=context.job.worker, ask=context.borrow, wait=wait)


def _timeout_s(session: Session) -> float:
    """How long a rank waits for another one: as long as the job may stand still."""
    stall = session.spec.run.stall
    if stall is None:
        stall = session.context.store.settings.usable().limits.stall
    return float(stall) if isinstance(stall, int | float) else _LONGEST_S
