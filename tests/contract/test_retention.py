"""Retention: what goes, what stays, and that looking first says the same."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from nimble_jobs.data import hidden
from nimble_jobs.job import JobState, Publication
from nimble_jobs.retention import Rules, Sweep
from nimble_jobs.retention.sweep import Done
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.store.tables import JobRow
from nimble_jobs.worker.duties import Duties
from nimble_jobs.worker.pruning import INTERVAL_S, Prune
from tests.cli import Cli
from tests.store_samples import queued

DAY_S = 86400.0
NOW = 1_800_000_000.0
ALL = Rules(keep_s=0, keep_failed_s=0, logs_s=0)
only_sqlite = pytest.mark.parametrize("url", [None], ids=["sqlite"])


@pytest.fixture
def store(tmp_path: Path, url: str | None) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home")), url) as opened:
        yield opened


def job(store: Store, name: str = "a", end: str | None = "succeeded", *, at: float = NOW, **more: Any) -> str:
    """The id of a job that ended so at that time; None: of one that is queued."""
    spec = {"name": name, "output": {"path": more.pop("path", "/nowhere/out")}}
    job = queued(store, spec=spec, name=name, kind=more.pop("kind", "score"), now=at, **more)
    if end is not None:
        taken = store.jobs.claim("w", device="cpu", now=at)
        assert taken is not None
        assert taken.id == job.id
        if end == "succeeded":
            store.jobs.finish(job.id, 1, outputs={}, timings={"records_per_s": 2.0}, schedule={"hit": "miss"}, now=at)
        else:
            store.jobs.fail(job.id, 1, error="no", retry=False, lost=False, now=at)
        log(store, f"{job.id}.log", at)
    return job.id


def log(store: Store, name: str, at: float) -> Path:
    path = store.home / "logs" / name
    path.write_text("12345")
    os.utime(path, (at, at))
    return path


def prune(store: Store, rules: Rules = ALL, now: float = NOW + 120, *, remove: bool = True) -> dict[str, int]:
    return counts(Sweep(store, rules, now, remove=remove, sleep=lambda _: None).run())


def counts(done: Done) -> dict[str, int]:
    assert done.trouble == ()
    return {kind: number for kind, number, _ in done.rows}


def ids(store: Store) -> list[str]:
    return [each.id for each in store.jobs.list(descending=False)]


def test_a_job_goes_with_all_that_hangs_on_it(store: Store) -> None:
    """Its attempts, events and log; looking first says the same numbers and bytes, and changes nothing."""
    old, new = job(store), job(store, at=NOW + 10 * DAY_S)
    rules = Rules(keep_s=5 * DAY_S)
    now = NOW + 11 * DAY_S
    looked = Sweep(store, rules, now, remove=False).run()
    assert counts(looked) == {"jobs": 1, "attempts": 1, "events": 3, "logs": 1}
    assert ids(store) == [old, new]
    assert Sweep(store, rules, now, remove=True, sleep=lambda _: None).run() == looked
    assert ids(store) == [new]
    assert store.jobs.events(old) == store.jobs.attempts(old) == ()
    assert [path.name for path in (store.home / "logs").iterdir()] == [f"{new}.log"]
    assert prune(store, rules, now) == {}
    assert store.check() == []


def test_what_others_need_stays(store: Store) -> None:
    """A job that a queued one names in `run.after`, whether it still waits for it or not; until that one has ended."""
    parent = job(store, "parent")
    child = job(store, "child", None, after=[parent])
    assert prune(store) == {}
    store.jobs.cancel(child, NOW)
    assert prune(store, now=NOW + 1)["jobs"] == 2
    assert ids(store) == []


def test_an_array_goes_when_it_is_done(store: Store) -> None:
    """As long as one of its jobs has not ended, all stay."""
    first, second = job(store), job(store, end=None)
    with store.jobs._db._engine.begin() as connection:
        connection.execute(update(JobRow).values(array="0123456789ab"))
    assert prune(store) == {}
    store.jobs.cancel(second, NOW)
    prune(store)
    assert ids(store) == []
    assert first != second


def test_the_jobs_and_ticks_of_a_timer(store: Store) -> None:
    """As many of the newest stay as `cron.keep` says, whatever their age."""
    made = [job(store, at=NOW + n) for n in range(5)]
    with store.jobs._db._engine.begin() as connection:
        names = "name, state, since, moved_at, created_at, edited_at, file, base, allow_python, digest, spec"
        values = "'t', 'active', 0, 0, 0, 0, 'f', '/', '[]', '', '{\"cron\":{\"keep\":2}}'"
        connection.exec_driver_sql(f"INSERT INTO timers ({names}) VALUES ({values})")
        for n, job_id in enumerate(made):
            row = f"'t', {int(NOW) + n}, 'scheduled', 'submitted', '{job_id}', 0"
            connection.exec_driver_sql(f"INSERT INTO ticks (timer, due, kind, outcome, job, at) VALUES ({row})")
    told = prune(store, now=NOW + 999, remove=False)
    assert (told["jobs"], told["ticks"]) == (3, 3)
    told = prune(store, Rules(), NOW + 999)
    assert (told["jobs"], ids(store)) == (3, made[3:])
    assert prune(store, now=NOW + 999)["ticks"] == 3
    assert [tick.job for tick in store.timers.ticks("t")] == made[:2:-1]


def test_a_job_that_is_tried_again_meanwhile_stays(store: Store) -> None:
    """What was read before counts for nothing in the transaction that removes."""
    first, second = job(store), job(store)
    page = store.expiry.ended(above=0, limit=10)
    stale = [replace(each, attempt=0) if each.id == first else each for each in page]
    went, tally = store.expiry.remove(stale)
    assert (went, tally.counts["jobs"], ids(store)) == ([second], 1, [first])


def test_a_job_that_is_waited_for_meanwhile_stays(store: Store) -> None:
    """Nor is one removed that somebody began to wait for."""
    failed = job(store, end="failed")
    page = store.expiry.ended(above=0, limit=10)
    child = job(store, "child", None)
    with store.jobs._db._engine.begin() as connection:
        connection.exec_driver_sql(f"INSERT INTO waits (job, parent) VALUES ('{child}', '{failed}')")
    assert store.expiry.remove(page)[0] == []


def test_left_overs(store: Store, tmp_path: Path) -> None:
    """What a job staged goes whatever its age, not that of a job that has not ended, nor anything that is not ours."""
    out = tmp_path / "data" / "out"
    failed = job(store, end="failed", path=str(out))
    queued = job(store, "b", None, path=str(out))
    for name in (f".out.{failed}/attempt-1/part", f".out.{queued}/attempt-1/part", ".out.0123456789ab/x", ".out.swp"):
        (out.parent / name).parent.mkdir(parents=True, exist_ok=True)
        (out.parent / name).write_text("1234567")
    out.mkdir()
    assert prune(store, Rules(), NOW + 30) == {}, "whoever ended it may be about to do that"
    sweep = Sweep(store, Rules(), NOW + 120, remove=True, sleep=lambda _: None)
    assert sweep.run().rows == (("left-over folders", 1, 7),)
    assert sorted(path.name for path in out.parent.iterdir()) == [
        ".out.0123456789ab",
        f".out.{queued}",
        ".out.swp",
        "out",
    ]


def test_what_cannot_be_removed_keeps_its_job(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row is what says that the folder is ours; the reason is told, and everything else goes."""
    out = tmp_path / "out"
    bad, good = job(store, end="failed", path=str(out)), job(store)
    (tmp_path / f".out.{bad}").mkdir()

    def refuse(path: Path, job_id: str) -> None:
        raise hidden.DataError(f"{path}: cannot be written: {job_id}")

    monkeypatch.setattr(hidden, "discard_staging", refuse)
    done = Sweep(store, ALL, NOW + 120, remove=True, sleep=lambda _: None).run()
    assert (done.trouble, ids(store)) == ((f"{out}: cannot be written: {bad}",), [bad])
    assert good not in ids(store)


def test_checkpoints_go_with_the_last_job_that_needs_them(store: Store, tmp_path: Path) -> None:
    """The same training goes on from them as long as one of its jobs is there. What is not ours stays."""
    out = tmp_path / "out"
    first = job(store, end="failed", path=str(out), kind="finetune")
    second = job(store, end="failed", path=str(out), kind="finetune", at=NOW + 10 * DAY_S)
    for name in ("0123/step-00000002/checkpoint.json", "0123/damaged-1/x", "4567/notes.txt"):
        (tmp_path / ".out.training" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / ".out.training" / name).write_text("123")
    rules = Rules(keep_failed_s=5 * DAY_S)
    assert "checkpoints" not in prune(store, rules, NOW + 11 * DAY_S)
    assert (ids(store), (tmp_path / ".out.training/0123").is_dir()) == ([second], True)
    assert first not in ids(store)
    assert prune(store, rules, NOW + 20 * DAY_S, remove=False)["checkpoints"] == 1
    assert prune(store, rules, NOW + 20 * DAY_S)["checkpoints"] == 1
    assert [path.name for path in (tmp_path / ".out.training").rglob("*")] == ["4567", "notes.txt"]


def test_old_logs(store: Store) -> None:
    """Of workers that are gone, and of jobs that nobody knows; not of a worker that runs, nor other files."""
    log(store, "worker-20270101T000000Z-abc123.log", NOW - 40 * DAY_S)
    log(store, "0123456789ab.log", NOW - 40 * DAY_S)
    log(store, "0123456789ac.log", NOW - 10 * DAY_S)
    log(store, "bench.log", NOW - 40 * DAY_S)
    waiting = job(store, end=None, at=NOW)
    log(store, f"{waiting}.log", NOW - 40 * DAY_S)
    with store.workers.hold({"role": "worker", "started_at": time.time()}) as lease:
        begun = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(store.workers.live()[0].started_at))
        log(store, f"worker-{begun}-abc.log", NOW - 40 * DAY_S)
        assert prune(store, Rules(), NOW) == {"logs": 1, "worker logs": 1}
        assert lease.id
    left = sorted(path.name for path in (store.home / "logs").iterdir())
    assert left == sorted(["0123456789ac.log", "bench.log", f"{waiting}.log", f"worker-{begun}-abc.log"])


def test_events_of_no_job(store: Store) -> None:
    """What happened to workers is kept as long as logs, in as many steps as it takes."""
    for number in range(450):
        store.jobs.event("worker", "came", now=NOW - 40 * DAY_S + number)
    store.jobs.event("worker", "came", now=NOW)
    assert prune(store, Rules(), NOW, remove=False) == prune(store, Rules(), NOW) == {"events": 450}
    assert len(store.jobs.events()) == 1


def publish(store: Store, name: str, path: Path, at: str | None = None) -> str:
    """A job that published there; `at`: another DEVICE:INODE than the folder's."""
    made = queued(store, spec={"output": {"path": str(path)}}, name=name, kind="score", now=NOW)
    assert store.jobs.claim("w", device="cpu", now=NOW)
    info = path.stat()
    folder = at or f"{info.st_dev}:{info.st_ino}"
    note = Publication(token=name, job_id=made.id, path=str(path), folder=folder, manifest_sha256="0" * 64)
    ended = {"outputs": {}, "timings": {}, "schedule": {}, "publication": note}
    store.jobs.finish(made.id, 1, **ended, now=NOW + (name == "again"))
    return made.id


def test_publications(store: Store, tmp_path: Path) -> None:
    """A note goes once its job and its folder are gone: not while the folder or the job is there, nor with its disk."""
    there, gone, away, moved = (tmp_path / name for name in ("there", "gone", "away", "moved"))
    for path in (there, gone, away, moved):
        path.mkdir()
        publish(store, path.name, path, at="999999:1" if path == away else None)
    gone.rmdir()
    away.rmdir()
    moved.rename(tmp_path / "elsewhere")
    moved.mkdir()
    assert prune(store, Rules(), NOW + 120) == {}, "their jobs are there"
    assert prune(store, remove=False)["publications"] == 1
    assert prune(store)["publications"] == 1
    left = [store.publications.find(path.name) is not None for path in (there, gone, away, moved)]
    assert left == [True, False, True, True]
    publish(store, "again", moved)
    assert prune(store)["publications"] == 1, "a later job has taken the path over"
    assert store.publications.find("moved") is None
    assert store.publications.find("again") is not None


def test_outputs_stay(store: Store, tmp_path: Path) -> None:
    """Never an output."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "part-0.parquet").write_text("1")
    publish(store, "p", out)
    prune(store)
    assert [path.name for path in out.iterdir()] == ["part-0.parquet"]


def test_the_newest_of_each_name(store: Store) -> None:
    """They stay whatever their age; queued ones do not count."""
    made = [job(store, name, at=NOW + n) for n, name in enumerate("abaab")]
    queued = job(store, "a", None, at=NOW + 9)
    prune(store, Rules(keep_s=0, per_name=2))
    assert ids(store) == [made[1], made[2], made[3], made[4], queued]


@only_sqlite
def test_space_goes_back_to_the_disk(store: Store) -> None:
    """A new database's file becomes smaller, step by step, without being written anew."""
    for _ in range(40):
        queued(store, spec={"padding": "x" * 100_000}, name="big", kind="score", now=NOW)
    for made in store.jobs.list():
        store.jobs.cancel(made.id, NOW)
    before = (store.home / "nimble-jobs.db").stat().st_size
    done = Sweep(store, ALL, NOW + 120, remove=True, sleep=lambda _: None).run()
    after = (store.home / "nimble-jobs.db").stat().st_size
    assert done.given_back_bytes >= 40 * 100_000
    assert done.given_back_bytes <= before - after < done.given_back_bytes + 65_536
    assert store.check() == []


def test_one_worker_a_day(store: Store) -> None:
    """Of several that ask one prunes; none again before the next day, whichever way the clock goes."""
    turns = [store.expiry.take_turn("prune", NOW, NOW + n) for n in range(3)]
    assert turns == [True, False, False]
    assert store.expiry.take_turn("prune", NOW + DAY_S, NOW + DAY_S)
    assert not store.expiry.take_turn("prune", NOW + DAY_S, NOW + DAY_S + 5)
    assert store.expiry.take_turn("prune", NOW, NOW + 5), "the clock was a day ahead"


def test_the_daily_duty(store: Store) -> None:
    """It waits for the configured hour, and removes a step at a time; a second worker of that day does nothing."""
    old = job(store, at=NOW - 40 * DAY_S)
    workers = [Duties([Prune(store)], record=lambda *_: None) for _ in range(2)]

    def turn(now: float, times: int = 1) -> None:
        for number in range(times):
            for duties in workers:
                duties.run(now + number)
                assert not duties.failing

    turn(NOW)
    assert ids(store) == [old], "it is off"
    config = store.home / "config.yaml"
    config.write_text("version: 1\nretention: {daily: '03:30'}\n")
    config.chmod(0o600)
    turn(NOW + INTERVAL_S, 60)
    assert ids(store) == []
    (pruned,) = [event for event in store.jobs.events() if event.kind == "pruned"]
    assert pruned.message == "removed 6 rows and files: jobs: 1, attempts: 1, events: 3, logs: 1"
    again = job(store, at=NOW - 40 * DAY_S)
    turn(NOW + 3 * INTERVAL_S, 60)
    assert ids(store) == [again]
    turn(NOW + DAY_S, 60)
    assert ids(store) == []


@pytest.fixture
def cli(tmp_path: Path, url: str | None, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path / "home", capsys)


def test_the_command(cli: Cli) -> None:
    """A dry run prints the same table; a bad age is refused before anything happens."""
    with cli.store() as store:
        job(store, at=time.time() - 100)
    dry = cli("prune", "--keep", "1m", "--dry-run")
    assert dry.out.splitlines()[:2] == ["KIND\tCOUNT\tSIZE", dry.out.splitlines()[1]]
    assert dry.lines[-1].startswith("would remove 1 job and ")
    told = cli("prune", "--keep", "1m", "--dry-run", "--json").json
    assert (told["removed"], [row["kind"] for row in told["rows"]]) == (False, ["jobs", "attempts", "events", "logs"])
    assert cli("prune", "--keep", "1 month").code == 2
    assert cli("prune", "--per-name", "0").code == 2
    assert cli("prune").err == "nothing to remove\n"
    asked = cli("prune", "--keep", "1m")
    assert (asked.code, "nobody to ask; pass --yes" in asked.err) == (2, True)
    real = cli("prune", "--keep", "1m", "--yes")
    assert (real.code, real.out) == (0, dry.out)
    assert real.lines[-1].startswith("removed 1 job and ")
    assert cli("prune", "--keep", "0s", "--json").json["rows"] == []
    assert JobState.SUCCEEDED.final
