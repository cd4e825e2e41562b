"""The queue from Python: submit many jobs at once, and retry, hold and release jobs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nimble_jobs import spec as specs
from nimble_jobs.client import Home, allowed_python, opened
from nimble_jobs.errors import UsageError
from nimble_jobs.job import After, Job
from nimble_jobs.settings.allowed import check_targets
from nimble_jobs.spec import JobSpec, code, many
from nimble_jobs.spec.grid import combinations
from nimble_jobs.store import Again, NewJob, Store
from nimble_jobs.tracing import submitter_traceparent


@dataclass(frozen=True, kw_only=True)
class Array:
    """Jobs that were submitted together."""

    id: str  # `wait`, `cancel`, `retry`, `hold` and `release` take it in place of a job's id
    jobs: tuple[Job, ...]  # in order; for a key that existed already, the existing job


def submit_array(
    source: Sequence[JobSpec] | Path | str,
    *,
    grid: Mapping[str, Sequence[Any]] | None = None,
    store: Store | None = None,
    home: Home = None,
    overrides: Sequence[str] = (),
    priority: int | None = None,
    after: Sequence[After | str] = (),
    delay_s: float = 0.0,
    allow_python: Sequence[Path | str] = (),
    now: float | None = None,
) -> Array:
    """Queue several jobs in one transaction: all of them, or none.

    `source`: specs; or a file with one JSON spec per line; or, with `grid`, a spec file that is submitted once for each
    combination of the grid's values, by dotted path. The other arguments apply to each job, as in `submit`. Raises
    SpecError for each wrong line or combination, and if two jobs have the same output; UsageError and NotFound as
    `submit` does.
    """
    if isinstance(source, Path | str):
        path = Path(source)
        if grid is None:
            loaded = many.load_lines(path, overrides, check_files=not after)
        else:
            loaded = many.load_grid(path, combinations(grid), overrides, check_files=not after)
    elif overrides or grid is not None:
        raise UsageError("overrides and grid need a file; a JobSpec is final")
    else:
        loaded = list(source)
        many.check_outputs([many.Labelled(file=f"job {i} ({spec.name})", spec=spec) for i, spec in enumerate(loaded)])
    return queue_array(
        loaded,
        store=store,
        home=home,
        priority=priority,
        after=after,
        delay_s=delay_s,
        allow_python=allow_python,
        now=now,
    )


def queue_array(
    loaded: Sequence[JobSpec],
    *,
    store: Store | None = None,
    home: Home = None,
    priority: int | None = None,
    after: Sequence[After | str] = (),
    delay_s: float = 0.0,
    allow_python: Sequence[Path | str] = (),
    now: float | None = None,
) -> Array:
    """As `submit_array`, for specs whose outputs are known to differ."""
    if not loaded:
        raise UsageError("no specs to submit; expected at least one")
    now = time.time() if now is None else now
    with opened(store, home) as store:
        settings = store.settings.now()
        folders = allowed_python(allow_python, settings=settings)
        new = []
        for spec in loaded:
            if spec.cron is not None:
                raise UsageError(f"{spec.name} has a cron part; add it as a timer, or remove that part")
            check_targets(spec.notify, settings, f"job {spec.name}")
            specs.check_home(spec, store.home)
            code.check(spec, folders)
            job = NewJob.of(spec, allow_python=tuple(map(str, folders)))
            new.append(
                replace(
                    job,
                    priority=job.priority if priority is None else priority,
                    after=(*job.after, *after),
                    not_before=now + delay_s if delay_s else 0.0,
                    traceparent=submitter_traceparent(),
                )
            )
        array, jobs = store.jobs.queue_array(new, now)
        return Array(id=array, jobs=tuple(jobs))


def retry(
    ids: str | Sequence[str] = (),
    *,
    failed: bool = False,
    since: float | None = None,
    with_dependents: bool = False,
    store: Store | None = None,
    home: Home = None,
    now: float | None = None,
) -> Again:
    """Queue jobs again that failed, were cancelled or quarantined, with fresh attempts: all of them, or none.

    `failed`: every job that failed or was quarantined, since `since` (Unix seconds) if given. `with_dependents`: also
    jobs that were cancelled because they waited for one of these. Earlier attempts stay in the history. Raises
    NotFound, and UsageError with a line for each job that cannot be queued again.
    """
    if not ids and not failed:
        raise UsageError("no jobs to retry; expected ids, or failed=True")
    with opened(store, home) as store:
        return store.jobs.retry(
            [ids] if isinstance(ids, str) else ids,
            failed=failed,
            since=since,
            with_dependents=with_dependents,
            now=time.time() if now is None else now,
        )


def hold(
    ids: str | Sequence[str], *, store: Store | None = None, home: Home = None, now: float | None = None
) -> list[Job]:
    """Keep workers from starting these queued jobs until they are released: all of them, or none.

    Raises NotFound, and UsageError with a line for each job that is not queued.
    """
    with opened(store, home) as store:
        return store.jobs.hold([ids] if isinstance(ids, str) else ids, time.time() if now is None else now)


def release(
    ids: str | Sequence[str], *, store: Store | None = None, home: Home = None, now: float | None = None
) -> list[Job]:
    """Let held jobs run again. Raises as `hold` does, and UsageError for a job that is not held."""
    with opened(store, home) as store:
        return store.jobs.release([ids] if isinstance(ids, str) else ids, time.time() if now is None else now)
