"""What the dashboard reads of trainings, timers and workers, as they are on the disk."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text

from nimble_jobs import cron
from nimble_jobs.dashboard.reads import curves
from nimble_jobs.dashboard.reads.log import read_part
from nimble_jobs.dashboard.reads.places import file_of
from nimble_jobs.data.hidden import staging_root
from nimble_jobs.job import Event, JobState
from nimble_jobs.store import Store, listed, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.store.listed import Match, Wanted, page_of
from tests.cli import Cli
from tests.dashboards import Dashboard
from tests.store_samples import PARTS, a_schedule, key_of, many_jobs
from tests.timers import spec_of


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home"))) as opened:
        yield opened


def epoch(number: int, **data: Any) -> Event:
    return Event(at=1.0, job_id="j", attempt=1, kind="epoch", message="", data={"epoch": number, **data})


def steps(count: int) -> str:
    return "".join(
        json.dumps({"kind": "step", "step": i, "epoch": 1, "lr": 0.1, "loss": 1 / i, "accuracy": 0.5}) + "\n"
        for i in range(1, count + 1)
    )


def test_curves_of_a_short_training(tmp_path: Path) -> None:
    """Every step, with the held-out figures of each epoch at their step; a line that is being written is left out."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(steps(3) + '{"kind": "epoch", "epoch": 1, "step": 3, "val_loss": 0.5}\n{"kind": "st')
    found = curves.points(path, [epoch(1, step=3, val_loss=0.5, loss=9.0)])
    assert found[0] == {"step": 1, "lr": 0.1, "loss": 1.0, "accuracy": 0.5}
    assert found[2] == {"step": 3, "lr": 0.1, "loss": 1 / 3, "accuracy": 0.5, "val_loss": 0.5}
    assert len(found) == 3


def test_curves_of_a_long_training_are_thinned(tmp_path: Path) -> None:
    """Some hundred steps, the last one among them, however long the file; epochs likewise."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(steps(100_000))
    found = curves.points(path, [epoch(i, step=i * 100, val_loss=1.0) for i in range(1, 1001)])
    assert sum("loss" in point for point in found) <= curves.POINTS
    assert sum("val_loss" in point for point in found) <= curves.POINTS
    assert found[-1]["step"] == 100_000
    assert found[-1]["loss"] == 1 / 100_000
    numbers = [point["step"] for point in found if "loss" in point]
    assert max(b - a for a, b in itertools.pairwise(numbers)) < 5 * 100_000 / curves.POINTS


def test_curves_without_a_file() -> None:
    """A training that failed, or whose output was replaced, is left with the means of its epochs."""
    found = curves.points(None, [epoch(1, step=3, loss=0.5, val_loss=0.7), epoch(2, step=6, loss=0.25, val_loss=0.6)])
    assert found == [{"step": 3, "loss": 0.5, "val_loss": 0.7}, {"step": 6, "loss": 0.25, "val_loss": 0.6}]


@pytest.mark.parametrize(
    "line", ["", "null", "[]", "{", '{"kind": "step"}', '{"kind": "step", "step": "1"}', "[" * 9999]
)
def test_curves_of_a_broken_file(tmp_path: Path, line: str) -> None:
    """What is no step is left out, as are values that are no numbers."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{line}\n{{"kind": "step", "step": 7, "loss": NaN, "lr": null, "x": "<b>"}}\n')
    assert curves.points(path, []) == [{"step": 7}]


def test_no_curves(tmp_path: Path) -> None:
    """A missing file, and a pipe that would never answer."""
    assert curves.points(None, []) == []
    assert curves.points(tmp_path / "none", []) == []
    os.mkfifo(tmp_path / "pipe")
    assert curves.points(tmp_path / "pipe", []) == []
    assert read_part(tmp_path / "pipe", None, 1024).text == ""


def test_files_of_a_job(store: Store, tmp_path: Path) -> None:
    """Of a running job those that it stages; of an ended one only what it published itself."""
    many_jobs(store, 10, now=time.time())
    job = store.jobs.list(states=[JobState.SUCCEEDED])[0]
    out = tmp_path / "out"
    running = replace(job, state=JobState.RUNNING, attempt=2, spec={"output": {"path": str(out)}})
    assert file_of(store, running, "x") == staging_root(out, job.id) / "attempt-2" / "x"
    out.mkdir()
    (out / "manifest.json").write_text(json.dumps({"made_by": "nimble-jobs", "job_id": job.id, "files": []}))
    assert file_of(store, replace(running, state=JobState.SUCCEEDED), "x") is None  # nobody knows this publication
    assert file_of(store, replace(running, state=JobState.FAILED), "x") is None
    assert file_of(store, replace(running, spec={}), "x") is None


def plan_of(store: Store, matches: list[Match], before: int | None) -> list[str]:
    """What SQLite does for a page of jobs: its plan for each statement."""
    statements: list[tuple[str, Any]] = []

    def note(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_more: Any) -> None:
        statements.append((statement, parameters))

    engine = store.jobs._db._engine
    event.listen(engine, "before_cursor_execute", note)
    wanted = Wanted(matches=matches, limit=50, now=0.0)
    store.jobs._db.read(lambda session: page_of(session, wanted, before=before))
    event.remove(engine, "before_cursor_execute", note)
    plans = []
    for statement, parameters in statements:
        if not statement.startswith("SELECT"):
            continue
        with engine.connect() as connection:
            rows = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()
            plans.append("; ".join(str(row[3]) for row in rows))
    return plans


@pytest.mark.parametrize("before", [None, 700])
@pytest.mark.parametrize(
    "matches",
    [
        [],
        [Match(column="state", compare="=", value="succeeded")],
        [Match(column="kind", compare="=", value="finetune")],
        [Match(column="kind", compare="=", value="finetune"), Match(column="state", compare="=", value="failed")],
        [Match(column="text", compare="contains", value="nothing")],
        [Match(column="state", compare="=", value="queued"), Match(column="text", compare="contains", value="nothing")],
    ],
)
def test_no_page_sorts_jobs(store: Store, matches: list[Match], before: int | None) -> None:
    """The order of submission comes from an index or the table itself; with a match, from its index."""
    many_jobs(store, 1000, now=1000.0)
    plans = plan_of(store, matches, before)
    assert plans
    for plan in plans:
        assert "TEMP B-TREE" not in plan, plan
        if matches and matches[0].column in ("state", "kind"):
            assert "USING" in plan, plan
            assert "INDEX ix_jobs_" in plan or "COVERING INDEX ix_jobs_" in plan, plan


def test_a_rare_match_reads_a_bounded_part(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page ends after so many jobs were looked at, and says where the next one begins; together they find all."""
    monkeypatch.setattr(listed, "EXAMINED", 100)
    many_jobs(store, 1000, now=1000.0)
    wanted = Wanted(matches=[Match(column="text", compare="contains", value="NO SUCH FILE")], limit=7, now=0.0)
    found, before, pages = [], None, 0
    while pages == 0 or before is not None:
        jobs, before = store.jobs.page(wanted, before=before)
        found += jobs
        pages += 1
    assert len(found) == len({job.id for job in found}) == 100
    assert pages >= 15
    nothing = Wanted(matches=[Match(column="text", compare="contains", value="none")], limit=7, now=0.0)
    jobs, before = store.jobs.page(nothing)
    assert (jobs, before) == ([], 901)
    with store.jobs._db._engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM jobs")).scalar() == 1000


def test_timers(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Past and next ticks as `cron show` has them; pause, resume and trigger are its commands."""
    cron.add(spec_of(tmp_path), store=store)
    cli = Cli(store.home, capsys)
    with Dashboard.started(store.home) as board:
        assert board.post("/api/timers/nightly/trigger").json["job"] == cron.history("nightly", store=store)[0].job
        shown, found = cli("cron", "show", "nightly", "--json").json, board.get("/api/timers/nightly")
        ticks = [tick["tick"] for tick in found["next"]]
        assert ticks[: len(shown["next"])] == [tick["tick"] for tick in shown["next"]]
        assert found["ticks"] == shown["ticks"]
        assert found["spec"] == shown["spec"]
        listed = board.get("/api/timers")
        assert [row["name"] for row in listed["timers"]] == ["nightly"]
        assert listed["timers"][0]["ticks"] == shown["ticks"]
        assert board.post("/api/timers/nightly/pause").json["message"] == "nightly: paused"
        assert store.timers.get("nightly").state == "paused"
        assert board.post("/api/timers/nightly/resume").status == 200
        assert store.timers.get("nightly").state == "active"


def test_workers(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of `worker ls` with the job's progress; orders reach the worker, and an unanswered one says so."""
    info = {"role": "worker", "device": "cpu", "status": "ready"}
    many_jobs(store, 10, now=time.time() - 100)
    cli = Cli(store.home, capsys)
    with store.workers.hold(info) as lease, Dashboard.started(store.home) as board:
        job = store.jobs.claim(lease.id, device="cpu", now=time.time())
        assert job is not None
        (row,) = board.get("/api/workers")["workers"]
        (listed,) = cli("worker", "ls", "--json").json
        assert {name for name in listed if row[name] != listed[name]} <= {"up_s"}
        assert (row["id"], row["job"], row["running"]["id"]) == (lease.id, job.id, job.id)
        assert row["host_memory_bytes"] > 0
        answer = board.post(f"/api/workers/{lease.id}/pause").json
        assert "has not answered yet" in answer["message"]
        assert not answer["answered"]
        assert store.orders.of(lease.id).wanted == "pause"
        assert board.post(f"/api/workers/{lease.id}/resume").status == 200
        assert store.orders.of(lease.id).wanted == "run"


def test_the_timeline_of_a_job(store: Store) -> None:
    """The drawing of `explain --timeline` from the stored schedule; without one, words."""
    many_jobs(store, 10, now=time.time() - 100)
    key = key_of("timeline")
    store.schedules.save(a_schedule(key), parts=PARTS, now=1000.0)
    job = store.jobs.claim("w", device="cpu", now=time.time())
    assert job is not None
    with Dashboard.started(store.home, "--read-only") as board:
        path = f"/api/jobs/{job.id}/timeline.svg"
        reply = board.ask("GET", path, {"Cookie": board.cookie})
        assert (reply.status, reply.json["error"]["message"]) == (404, f"job {job.id} has no schedule")
        store.jobs.progress(job.id, job.attempt, done=0, total=None, bad=0, schedule={"key": key, "hit": "stored"})
        reply = board.ask("GET", path, {"Cookie": board.cookie})
        assert reply.status == 200
        assert reply.body.startswith(b"<svg ")
        assert reply.headers["content-type"] == "image/svg+xml"
        policy = reply.headers["content-security-policy"]
        assert policy == "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; sandbox"


def test_attempts_of_dead_processes_end(store: Store) -> None:
    """As with `ls`: without a worker nothing else would notice. A read-only dashboard changes nothing."""
    many_jobs(store, 10, now=time.time() - 100)
    job = store.jobs.claim("7-gone", device="cpu", now=time.time())
    assert job is not None
    with Dashboard.started(store.home, "--read-only") as board:
        board.get("/api/jobs")
        assert store.jobs.get(job.id).state is JobState.RUNNING
    with Dashboard.started(store.home) as board:
        assert board.get(f"/api/jobs/{job.id}")["job"]["state"] == "queued"
