"""Timers that fire into a real store: overlap, catch-up, clock jumps, errors. The clock is an argument."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from nimble_jobs.job import JobState
from nimble_jobs.store import Store, TimerState, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.store.timer_tables import TimerRow
from nimble_jobs.store.transitions import changed
from nimble_jobs.timers import resume
from tests.timers import DAY, HOUR, MINUTE, NOON, add, end, fire, rows, start, told

SUBMITTED = "submitted"


@pytest.fixture
def store(tmp_path: Path, url: str | None) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home")), url) as opened:
        yield opened


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "work"


def hours(store: Store, folder: Path, until: int, **cron: Any) -> list[str]:
    """Run an hourly timer whose job takes three and a half hours. Returns the final outcome of each tick."""
    add(store, folder, **cron)
    running: list[tuple[Any, float]] = []
    now = NOON
    while now < NOON + until * HOUR:
        now += 10 * MINUTE
        for job, done_at in list(running):
            asked = store.jobs.get(job.id).cancel_requested
            if now >= done_at or asked:
                end(store, job, now)
                running.remove((job, done_at))
        fire(store, now)
        while (job := store.jobs.claim("0-test", device="cpu", now=now)) is not None:
            running.append((job, now + 3.5 * HOUR))
    return [outcome for _, _, outcome in rows(store)]


def test_a_tick_submits_a_job(store: Store, folder: Path) -> None:
    """The job's spec has its templates filled in, and no `cron` part."""
    add(store, folder, **{"run.key": "nightly {{ previous_tick:%H }} to {{ tick:%H }}", "run.priority": 7})
    assert fire(store, NOON + HOUR - 1) == []
    (tick,) = fire(store, NOON + HOUR + 2)
    job = store.jobs.get(tick.job or "")
    assert (tick.due, tick.kind, tick.outcome) == (NOON + HOUR, "scheduled", SUBMITTED)
    assert job.spec["output"]["path"] == str(folder / "out" / "2027-03-01T1300")
    assert (job.key, job.priority, job.spec["cron"]) == ("nightly 12 to 13", 7, None)
    assert fire(store, NOON + HOUR + 3) == []
    assert store.timers.get("nightly").next_due == NOON + 2 * HOUR


def test_overlap_skip(store: Store, folder: Path) -> None:
    """While a job runs, every tick is skipped, and its reason names the running job."""
    found = hours(store, folder, 9, overlap="skip")
    assert found == [SUBMITTED, "skipped", "skipped", "skipped"] * 2 + [SUBMITTED]
    first, second = store.timers.ticks("nightly")[::-1][:2]
    assert second.reason == f"job {first.job} had not ended; overlap: skip"


def test_overlap_queue(store: Store, folder: Path) -> None:
    """While a job runs, one tick waits and runs next. Ticks that come while it waits are skipped."""
    add(store, folder, overlap="queue")
    (first,) = fire(store, NOON + HOUR)
    job = start(store, first.job or "", NOON + HOUR)
    for hour in (2, 3):
        fire(store, NOON + hour * HOUR)
    assert [outcome for _, _, outcome in rows(store)] == [SUBMITTED, "waiting", "skipped"]
    assert (
        store.timers.ticks("nightly")[0].reason == "the tick of 2027-03-01 14:00 UTC is already waiting; overlap: queue"
    )
    end(store, job, NOON + 3.5 * HOUR)
    (second,) = fire(store, NOON + 3.5 * HOUR)
    assert (second.due, second.outcome) == (NOON + 2 * HOUR, SUBMITTED)
    assert store.jobs.get(second.job or "").spec["output"]["path"].endswith("2027-03-01T1400")
    assert len(store.jobs.list()) == 2


def test_overlap_allow(store: Store, folder: Path) -> None:
    """Every tick gets its job, however many are running."""
    assert hours(store, folder, 5, overlap="allow") == [SUBMITTED] * 5


def test_overlap_replace(store: Store, folder: Path) -> None:
    """The running job is asked to stop. The new job is submitted once it has stopped."""
    add(store, folder, overlap="replace")
    (first,) = fire(store, NOON + HOUR)
    job = start(store, first.job or "", NOON + HOUR)
    (second,) = fire(store, NOON + 2 * HOUR)
    assert second.outcome == "waiting"
    assert store.jobs.get(job.id).cancel_requested
    assert fire(store, NOON + 2 * HOUR + 5) == []
    (third,) = fire(store, NOON + 3 * HOUR)  # it does not stop: the later tick takes the place of the one that waits
    assert third.outcome == "waiting"
    end(store, job, NOON + 3 * HOUR + 5)
    (third,) = fire(store, NOON + 3 * HOUR + 6)
    assert [outcome for _, _, outcome in rows(store)] == [SUBMITTED, "skipped", SUBMITTED]
    (fourth,) = fire(store, NOON + 4 * HOUR)  # one that only waits for a worker goes at once
    assert fourth.outcome == SUBMITTED
    states = [store.jobs.get(tick.job or "").state for tick in (first, third, fourth)]
    assert states == [JobState.CANCELLED, JobState.CANCELLED, JobState.QUEUED]


def test_catch_up_latest(store: Store, folder: Path) -> None:
    """After a night without workers, one job runs, for the last tick."""
    add(store, folder)
    fire(store, NOON + 8.5 * HOUR)
    assert rows(store) == [(n, "scheduled", "missed") for n in range(1, 8)] + [(8, "catch-up", SUBMITTED)]
    assert len(store.jobs.list()) == 1


def test_catch_up_all(store: Store, folder: Path) -> None:
    """Each late tick runs, one after the other and in order, and so do ticks that become due meanwhile."""
    add(store, folder, catch_up="all")
    fire(store, NOON + 3.5 * HOUR)
    assert rows(store) == [(1, "catch-up", SUBMITTED), (2, "catch-up", "waiting"), (3, "catch-up", "waiting")]
    ran, now = [], NOON + 3.5 * HOUR
    while (job := store.jobs.claim("0-test", device="cpu", now=now)) is not None and len(ran) < 6:
        ran.append(job.spec["output"]["path"][-4:-2])
        now += 40 * MINUTE
        fire(store, now)
        end(store, job, now)
        fire(store, now)
    assert ran == ["13", "14", "15", "16", "17", "18"]
    assert {outcome for _, _, outcome in rows(store)} <= {SUBMITTED, "waiting"}


def test_catch_up_all_side_by_side(store: Store, folder: Path) -> None:
    """With `overlap: allow`, the jobs of all late ticks are submitted at once."""
    add(store, folder, catch_up="all", overlap="allow")
    fire(store, NOON + 70.5 * HOUR)
    assert rows(store) == [(n, "catch-up", SUBMITTED) for n in range(1, 71)]
    assert len(store.jobs.list()) == 70


def test_catch_up_none(store: Store, folder: Path) -> None:
    """Late ticks are missed. The next tick on time runs."""
    add(store, folder, catch_up="none")
    fire(store, NOON + 3.5 * HOUR)
    fire(store, NOON + 4 * HOUR)
    assert rows(store) == [(n, "scheduled", "missed") for n in (1, 2, 3)] + [(4, "scheduled", SUBMITTED)]


def test_a_tick_that_waits_for_too_long_is_missed(store: Store, folder: Path) -> None:
    """`grace` limits how late the job is submitted, including the time that the tick waits for its turn."""
    add(store, folder, overlap="queue", grace="10m")
    (first,) = fire(store, NOON + HOUR)
    start(store, first.job or "", NOON + HOUR)
    fire(store, NOON + 2 * HOUR)
    (late,) = [tick for tick in fire(store, NOON + 2 * HOUR + 601) if tick.due == NOON + 2 * HOUR]
    assert (late.outcome, late.job) == ("missed", None)
    assert late.reason == f"still waited after 601 s; job {first.job} had not ended; overlap: queue; grace: 600 s"


def test_an_edit_never_fires_the_past(store: Store, folder: Path) -> None:
    """Neither an edit nor a resume fires ticks that were due before it."""
    add(store, folder)
    add(store, folder, expression="*/10 * * * *", now=NOON + 5.75 * HOUR)
    assert fire(store, NOON + 5.75 * HOUR) == []
    assert [tick.due for tick in fire(store, NOON + 6 * HOUR)] == [NOON + 6 * HOUR - 10 * MINUTE, NOON + 6 * HOUR]
    store.timers.pause("nightly", NOON + 6 * HOUR)
    assert fire(store, NOON + 20 * HOUR) == []
    assert resume(store, "nightly", NOON + 20.5 * HOUR).since == NOON + 20.5 * HOUR
    assert fire(store, NOON + 20.5 * HOUR) == []
    assert [tick.due for tick in fire(store, NOON + 20.5 * HOUR + 600)] == [NOON + 20.5 * HOUR + 600]


@pytest.mark.parametrize("jump", [HOUR, DAY])
def test_the_clock_jumps_and_comes_back(store: Store, folder: Path, jump: int) -> None:
    """The clock jumps ahead and is corrected. Every tick has one row and at most one job, and the timer keeps firing
    instead of waiting for the wrong time to be reached again.
    """
    add(store, folder, expression="*/10 * * * *", overlap="allow")
    clock = [NOON + n * 5 * MINUTE for n in range(1, 13)]
    clock += [NOON + HOUR + jump + n * 5 * MINUTE for n in range(4)]
    clock += [NOON + HOUR + 20 * MINUTE + n * 5 * MINUTE for n in range(60)]
    for now in clock:
        fire(store, now)
    found = store.timers.ticks("nightly")[::-1]
    by_now = [tick for tick in found if tick.due <= clock[-1]]
    assert [tick.due for tick in by_now] == [NOON + n * 600 for n in range(1, int((clock[-1] - NOON) // 600) + 1)]
    jobs = [tick.job for tick in found if tick.job]
    assert len(jobs) == len(set(jobs)) == len(store.jobs.list())
    skipped_over = [tick for tick in by_now if tick.outcome == "missed"]
    assert all(NOON + HOUR < tick.due <= NOON + HOUR + 20 * MINUTE for tick in skipped_over)


@pytest.mark.parametrize("jump", [HOUR, DAY])
def test_the_clock_goes_back_and_forth(store: Store, folder: Path, jump: int) -> None:
    """The clock jumps back and is corrected. No tick fires twice, and none counts as late afterwards."""
    add(store, folder, expression="*/10 * * * *", overlap="allow")
    clock = [NOON + n * 5 * MINUTE for n in range(1, 13)]
    clock += [NOON + HOUR - jump + n * 5 * MINUTE for n in range(6)]
    clock += [NOON + HOUR + n * 5 * MINUTE for n in range(1, 13)]
    for now in clock:
        fire(store, now)
    assert [(tick.due, tick.outcome) for tick in store.timers.ticks("nightly")[::-1] if tick.due > NOON] == [
        (NOON + n * 600, SUBMITTED) for n in range(1, 13)
    ]
    assert len({tick.job for tick in store.timers.ticks("nightly")}) == len(store.jobs.list())


def test_a_clock_of_long_ago_is_not_believed(store: Store, folder: Path) -> None:
    """A machine whose clock starts in 1970 fires nothing and forgets nothing, and continues once its clock is right."""
    add(store, folder, overlap="allow", catch_up="all")
    for hour in range(1, 4):
        fire(store, NOON + hour * HOUR)
    before = rows(store)
    for now in (0.0, HOUR, 2 * HOUR):
        assert fire(store, now) == []
    fire(store, NOON + 4 * HOUR)
    assert rows(store) == [*before, (4, "scheduled", SUBMITTED)]


def test_a_row_for_several_is_cut_where_the_clock_went_back(store: Store, folder: Path) -> None:
    """If the clock is set back into the middle of a row, the row keeps only its past ticks. The others come again."""
    add(store, folder, expression="* * * * *", overlap="allow")
    fire(store, NOON + 3 * DAY)
    assert sum(tick.count for tick in store.timers.ticks("nightly")) == 3 * 1440
    fire(store, NOON + DAY + 30)
    fire(store, NOON + DAY + 60)
    found = store.timers.ticks("nightly", until=NOON + DAY + 60)
    assert sum(tick.count for tick in found) == 1441
    assert found[0].outcome == SUBMITTED
    assert found[1].until == NOON + DAY


def test_a_long_absence_is_bounded(store: Store, folder: Path) -> None:
    """Five days without workers, with a tick each minute: every tick is counted, in few rows."""
    add(store, folder, expression="* * * * *")
    fire(store, NOON + 5 * DAY)
    found = store.timers.ticks("nightly")
    assert sum(tick.count for tick in found) == 5 * 1440
    assert len(found) == 7 + 200
    assert [tick.outcome for tick in found[:2]] == [SUBMITTED, "missed"]


def gone_file(folder: Path) -> None:
    shutil.rmtree(folder / "in")


def gone_code(folder: Path) -> None:
    shutil.rmtree(folder / "code")


@pytest.mark.parametrize(
    ("harm", "reason"),
    [(gone_file, "input.source: no file or folder"), (gone_code, "model.source: no file")],
)
def test_what_is_gone_is_said_in_the_row(store: Store, folder: Path, harm: Any, reason: str) -> None:
    """If an input or a model file is gone, the tick gets an error and no job. Once it is back, the next tick runs."""
    folder.mkdir()
    (folder / "code").mkdir()
    (folder / "code" / "net.py").write_text("def make(): ...\n")
    timer = add(store, folder, **{"model.source": f"python:{folder}/code/net.py:make"})
    allowed = [str(folder / "code")]
    store.timers.add(
        name="nightly", spec=timer.spec, file=timer.file, base=timer.base, allow_python=allowed,
        first=lambda _timer: None, now=NOON,
    )  # fmt: skip
    store.timers.pause("nightly", NOON)
    resume(store, "nightly", NOON)
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    harm(folder)
    (tick,) = fire(store, NOON + HOUR)
    assert (tick.outcome, tick.job) == ("error", None)
    assert reason in (tick.reason or "")
    assert str(folder / "nightly.yaml") in (tick.reason or "")
    assert store.jobs.list() == []
    shutil.copytree(copy, folder, dirs_exist_ok=True)
    assert told(fire(store, NOON + 2 * HOUR)) == [(2, "scheduled", SUBMITTED)]


def test_code_that_nobody_allows_is_an_error(store: Store, folder: Path) -> None:
    """A tick gets an error if the model's folder was not allowed when the timer was added."""
    folder.mkdir()
    (folder / "net.py").write_text("def make(): ...\n")
    add(store, folder, **{"model.source": f"python:{folder}/net.py:make"})
    (tick,) = fire(store, NOON + HOUR)
    assert tick.outcome == "error"
    assert (tick.reason or "").startswith(f"model.source: {folder}/net.py may not be run; allow its folder with")


def test_a_damaged_timer_says_so(store: Store, folder: Path) -> None:
    """A damaged timer submits nothing, and other timers continue. Adding it again repairs it."""
    add(store, folder)
    add(store, folder, "other")
    broken = update(TimerRow).where(TimerRow.name == "nightly").values(spec="{}")
    store._database.write(lambda session: changed(session, broken))
    assert store.check() == ["timer nightly: its stored spec is damaged; add it again"]
    fire(store, NOON + HOUR)
    (tick,) = store.timers.ticks("nightly")
    assert (tick.outcome, store.timers.get("nightly").next_due) == ("error", None)
    assert "damaged" in (tick.reason or "")
    assert rows(store, "other") == [(1, "scheduled", SUBMITTED)]
    assert add(store, folder, now=NOON + HOUR).state is TimerState.ACTIVE
    assert len(fire(store, NOON + 2 * HOUR)) == 2


def test_timers_with_much_to_do_do_not_hold_up_others(store: Store, folder: Path) -> None:
    """A firer stops at its time budget and says that more is left, so every timer gets its turn."""
    from nimble_jobs.timers import Firer

    add(store, folder, "years", expression="* * * * *")
    for number in range(3):
        add(store, folder, f"hourly-{number}")
    firer = Firer(store, budget_s=0.0)
    now, parts = NOON + 20 * DAY, 0
    while not all(rows(store, f"hourly-{number}") for number in range(3)):
        assert firer.run(now).more
        parts += 1
    assert parts < 60
