"""SIGKILL between any two SQL statements of eight processes that fire the same fifty timers: each tick has exactly one
row, and each submitted tick exactly one job.

NIMBLE_JOBS_TIMER_ROUNDS sets the number of rounds, one by default and two hundred with --all; NIMBLE_JOBS_KILL_SEED
the random moments. With NIMBLE_JOBS_KILL_DATABASE=postgresql the processes have two state folders over one database.
docs/measurements/timer-kill-rounds.md holds what was measured.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from nimble_jobs.store import Store, TickOutcome, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.store.open_jobs import WAITING_AT_MOST
from nimble_jobs.store.tables import EventRow, JobRow
from nimble_jobs.store.timer_tables import TickRow
from nimble_jobs.timers.keep import rhythm_of
from tests import postgres, prefork
from tests.seeds import seed
from tests.timers import HOUR, MINUTE, NOON, add, fire
from tests.waiting import PATIENCE_S

ROUNDS = int(os.environ["NIMBLE_JOBS_TIMER_ROUNDS"])
SEED = seed()
SHARED = os.environ.get("NIMBLE_JOBS_KILL_DATABASE") == "postgresql"
TIMERS = 50
STEPS = 2  # times that a round's clock shows
JUMPS = {10 * MINUTE: 8, 20 * MINUTE: 4, HOUR: 2, 5 * HOUR: 1, -HOUR: 2}  # weights
JITTER_S = 3
EXPRESSIONS = [f"*/{minutes} * * * *" for minutes in (10, 10, 10, 5, 20, 30)] + ["* * * * *"]
OVERLAPS = ("skip", "queue", "allow", "replace")
CATCH_UPS = ("latest", "none", "latest", "latest", "all", "latest", "none")  # of seven timers


@contextmanager
def farm() -> Iterator[Any]:
    """The process that forks the firing processes."""
    command = [sys.executable, "-m", "tests.timer_farm"]
    start = subprocess.Popen if os.environ.get(prefork.COLD) else prefork.Process
    process: Any = start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.stdin.close()
        assert process.wait(timeout=PATIENCE_S) == 0
        process.stdout.close()


def clock_of(chance: random.Random) -> list[float]:
    """The times that a round's clock shows: minutes that pass, long gaps, and jumps in both directions."""
    now, times = NOON + 5.0, []
    for _ in range(STEPS):
        now = max(now + chance.choices(list(JUMPS), list(JUMPS.values()))[0], NOON + 10 * MINUTE + 5)
        times.append(now)
    return [*times, max(times) + MINUTE]


def verdicts(store: Store, now: float) -> Counter[str]:
    """Check every tick, and count the ticks by outcome."""
    found = Counter[str]()
    jobs: list[str] = []
    for timer in store.timers.list():
        ticks = store.timers.ticks(timer.name)[::-1]
        waiting = sum(tick.outcome is TickOutcome.WAITING for tick in ticks)
        # With so many that wait for their turn, those after them are taken in once some have run.
        behind = waiting >= WAITING_AT_MOST and timer.next_due is not None
        until = timer.next_due - 1 if behind and timer.next_due else now - JITTER_S
        due = list(takewhile(lambda tick, until=until: tick <= until, rhythm_of(timer).after(timer.since)))  # type: ignore[misc]
        covered: list[int] = []
        for tick in ticks:
            inside = due[bisect_left(due, tick.due) : bisect_right(due, tick.until or tick.due)]
            assert len(inside) == tick.count, (timer.name, tick)
            covered += inside
            found[tick.outcome.value] += tick.count
            assert (tick.job is not None) == (tick.outcome is TickOutcome.SUBMITTED), (timer.name, tick)
            jobs += [tick.job] if tick.job else []
        assert covered == due, (timer.name, set(covered) ^ set(due))
    kept = store._database.read(lambda session: list(session.scalars(select(JobRow.id))))
    assert sorted(jobs) == sorted(kept)  # each job belongs to one tick, and each tick that has one to a job of its own
    submitted = select(func.count()).where(EventRow.kind == "submitted")
    assert store._database.read(lambda session: session.scalar(submitted)) == len(kept)
    assert store._database.read(lambda session: session.scalar(select(func.count()).select_from(TickRow))) > 0
    store.recover(now)  # jobs that a killed process ran
    assert store.check() == []
    return found


def timers_in(folder: Path) -> Path:
    """A state folder with the timers of a round."""
    home = resolve(str(folder))
    with open_store(home) as store:
        for number in range(TIMERS):
            rules = {"overlap": OVERLAPS[number % 4], "catch_up": CATCH_UPS[number % 7]}
            expression = EXPRESSIONS[number % 7]
            add(store, folder.parent, f"timer-{number}", expression=expression, jitter=number % JITTER_S, **rules)
    return home


@contextmanager
def database() -> Iterator[str | None]:
    """In the environment of the block: PostgreSQL, if these rounds use it. Yields its URL."""
    if not SHARED:
        yield None
        return
    with postgres.schema() as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("NIMBLE_JOBS_DB", url)
        yield url


def homes_of_round(folder: Path, url: str | None) -> list[Path]:
    """New state folders with the timers of a round, and nothing else in their database."""
    if url is None:
        new = folder / "new"
        return [shutil.copytree(new if new.exists() else timers_in(new), folder / "home")]
    other = resolve(str(folder / "other"))
    with open_store(other):  # makes the tables
        postgres.empty(url)
    return [timers_in(folder / "home"), other]


def told(total: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(total.items()))


@pytest.mark.timeout(120 + 30 * ROUNDS)
def test_eight_processes_fire_the_same_timers(capsys: Any) -> None:
    """No tick is lost or fired twice, whichever statement a process dies at and whatever the clock does."""
    chance = random.Random(SEED)
    total, began = Counter[str](), time.monotonic()
    with (
        database() as url,
        farm() as process,
        tempfile.TemporaryDirectory(
            prefix="nimble-timers-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None
        ) as name,
    ):
        for number in range(ROUNDS):
            homes = homes_of_round(Path(name), url)
            home, times = homes[0], clock_of(chance)
            print(",".join(map(str, homes)), chance.randrange(1 << 30), *times, file=process.stdin, flush=True)
            answer = process.stdout.readline()
            assert answer, (home / "farm.log").read_text()
            total.update(json.loads(answer))
            with open_store(home) as store:
                assert store._database.is_sqlite is not SHARED
                fire(store, times[-1])
                total += verdicts(store, times[-1])
            total["rounds"] += 1
            for each in homes:
                shutil.rmtree(each)
            if ROUNDS > 10 and number % 5 == 4:
                with capsys.disabled():
                    print(f"{number + 1} rounds, {time.monotonic() - began:.0f} s: {told(total)}", flush=True)
    assert total["kills"] > 10 * ROUNDS
    assert total["submitted"] > TIMERS  # how many there are depends on the machine
    print(f"seed {SEED}, {time.monotonic() - began:.0f} s: {told(total)}")
