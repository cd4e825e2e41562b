"""What somebody has to do something about: in the queue, about workers, timers, notifications, the configuration."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from nimble_jobs.job import JobState
from nimble_jobs.plural import count
from nimble_jobs.views import figures
from nimble_jobs.views.timers import LATE_S, NOBODY
from nimble_jobs.views.waits import START

if TYPE_CHECKING:
    from nimble_jobs.store import Store, WorkerInfo

FREE_BYTES = 1 << 30  # with less free space on the state folder's disk, jobs soon wait for it
_RECENT_S = 86400.0  # jobs that failed earlier are no news
_LOOKED_AT = 100  # newest jobs of a state


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One thing to do something about, or to know."""

    level: Literal["problem", "note"]
    title: str
    words: str
    hint: str | None = None  # what to do next; None if `words` says it


def alerts(store: Store, now: float) -> list[Alert]:
    """What is not well, problems first."""
    found = [
        *_disk(store),
        *_configuration(store),
        *_workers(store),
        *_failed(store, now),
        *(_alert("timers", *finding) for finding in timer_findings(store, now) if finding[0] != "ok"),
        *(_alert("notifications", *finding) for finding in notification_findings(store)),
    ]
    return sorted(found, key=lambda alert: alert.level != "problem")


def _alert(title: str, status: str, text: str) -> Alert:
    return Alert(level="problem" if status == "problem" else "note", title=title, words=text)


def _disk(store: Store) -> Iterator[Alert]:
    free = shutil.disk_usage(store.home).free
    if free < FREE_BYTES:
        yield Alert(
            level="problem",
            title="disk",
            words=f"{figures.size(free)} are free on the disk of the state folder {store.home}",
            hint="make room, for instance with: nimble-jobs prune, nimble-jobs cache prune",
        )


def _configuration(store: Store) -> Iterator[Alert]:
    problem = store.settings.problem
    if problem is not None:
        words = f"not valid; workers keep the previous values: {problem}"
        yield Alert(level="problem", title="config.yaml", words=words)


def _workers(store: Store) -> Iterator[Alert]:
    from nimble_jobs.store.health import health_of

    live = store.workers.live("worker")
    waiting = store.jobs.waiting()
    if waiting and not live:
        words = f"{count(waiting, 'job')} {'waits' if waiting == 1 else 'wait'}, and no worker is running"
        yield Alert(level="problem", title="no worker", words=words, hint=START)
    elif waiting and all(worker.info.get("wanted") == "pause" for worker in live):
        words = f"{count(waiting, 'job')} {'waits' if waiting == 1 else 'wait'}, and every worker is paused"
        yield Alert(level="problem", title="paused", words=words, hint="resume with: nimble-jobs worker resume")
    for worker in live:
        health = health_of(worker, store.home)
        if health.state is not None:
            yield Alert(level="problem" if health.broken else "note", title="worker", words=health.words)
        yield from _failing(worker)


def _failing(worker: WorkerInfo) -> Iterator[Alert]:
    for duty, reason in (worker.info.get("failing") or {}).items():
        words = f"worker {worker.id}: {duty} failed and will be retried: {reason}"
        yield Alert(level="note", title="worker", words=words)


def _failed(store: Store, now: float) -> Iterator[Alert]:
    from nimble_jobs.store.listed import Match, Wanted

    for state, hint in (
        (JobState.FAILED, "nimble-jobs show ID says why; once that is mended: nimble-jobs retry ID"),
        (JobState.QUARANTINED, "nimble-jobs logs ID has the last lines before the worker died"),
    ):
        match = Match(column="state", compare="=", value=state.value)
        jobs, _ = store.jobs.page(Wanted(matches=[match], limit=_LOOKED_AT, now=now))
        recent = [job for job in jobs if (job.finished_at or 0.0) >= now - _RECENT_S]
        if recent:
            number = count(len(recent), "job") if len(recent) < _LOOKED_AT else f"{_LOOKED_AT} jobs or more"
            verb = "failed" if state is JobState.FAILED else "crashed their worker and are quarantined"
            names = figures.few([f"{job.name} {job.id}" for job in recent])
            yield Alert(
                level="problem", title=state.value, words=f"{number} {verb} in the last day: {names}", hint=hint
            )


def notification_findings(store: Store) -> Sequence[tuple[str, str]]:
    """What an operator should know about notifications: status and text."""
    from nimble_jobs.store.notices import NoticeState

    counts = store.outbox.counts()
    findings: list[tuple[str, str]] = []
    given_up = counts.get(NoticeState.GIVEN_UP, 0)
    if given_up:
        text = f"{given_up} given up; list them with: nimble-jobs notifications ls --filter state=given_up"
        findings.append(("problem", text))
    failing = [n for n in store.outbox.list(states=[NoticeState.PENDING], limit=1000) if n.error]
    if failing:
        findings.append(("note", f"{len(failing)} will be retried; the newest error: {failing[0].error}"))
    return findings


def timer_findings(store: Store, now: float) -> Iterator[tuple[str, str]]:
    """The same about timers. Nothing if there are none."""
    from nimble_jobs import cron

    watched = cron.timers(store=store, now=now)
    active = [each for each in watched if each.timer.state == "active"]
    if not watched:
        return
    if active and not cron.firing(store=store):
        yield "problem", NOBODY.removeprefix("WARNING: ")
    for each in watched:
        if each.cron is None:
            yield "problem", f"{each.timer.name}: {each.words}"
        elif each.late_s > LATE_S:
            late = figures.duration(each.late_s)
            yield "note", f"{each.timer.name}: its tick has been due for {late}"
    yield "ok", f"{len(active):,} active, {len(watched) - len(active):,} paused"
