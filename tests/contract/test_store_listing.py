"""Listings of many jobs: the database filters, sorts and cuts, and no spec is read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from nimble_jobs.cli import job_list
from nimble_jobs.cli.listing import Selection
from nimble_jobs.job import JobState
from nimble_jobs.store import Store, listed, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.store.listed import Match
from nimble_jobs.views.jobs import job_row
from tests import postgres
from tests.cli import Cli
from tests.store_samples import many_jobs, queued

SPEC = {"name": "n", "padding": "x" * 5000}
NOW = 1_800_000_000.0


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A hundred jobs, of which ten failed."""
    with open_store(resolve(str(tmp_path_factory.mktemp("listing") / "home"))) as store:
        many_jobs(store, 100, now=NOW)
        yield store


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def either(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """The same in either database."""
    with ExitStack() as held:
        url = held.enter_context(postgres.schema()) if request.param == "postgresql" else None
        store = held.enter_context(open_store(resolve(str(tmp_path_factory.mktemp("either") / "home")), url))
        many_jobs(store, 100, now=NOW)
        yield store


class Watch:
    """The statements that a store sends, and how many jobs it makes of rows."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.records, self.sent = store, 0, list[tuple[str, Any]]()
        record = listed.job_record

        def counted(*args: Any, **more: Any) -> Any:
            self.records += 1
            return record(*args, **more)

        monkeypatch.setattr(listed, "job_record", counted)
        event.listen(store.jobs._db._engine, "before_cursor_execute", self._see)

    def _see(self, _connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if statement.startswith("SELECT"):
            self.sent.append((statement, parameters))

    def plans(self) -> list[str]:
        """How the database answers each statement that asked for jobs."""
        event.remove(self.store.jobs._db._engine, "before_cursor_execute", self._see)
        connection = self.store.jobs._db._engine.raw_connection()
        try:
            cursor = connection.cursor()
            return [
                " | ".join(row[3] for row in cursor.execute(f"EXPLAIN QUERY PLAN {statement}", parameters))
                for statement, parameters in self.sent
            ]
        finally:
            connection.close()


@pytest.mark.parametrize(
    ("filters", "sort", "index"),
    [
        ((), None, None),
        (("state=failed",), None, "ix_jobs_state"),
        (("name=job-3",), None, "ix_jobs_name"),
        (("state=failed", "created<1000d"), None, "ix_jobs_state"),
    ],
)
def test_a_short_listing_reads_few_jobs(
    store: Store, monkeypatch: pytest.MonkeyPatch, filters: tuple[str, ...], sort: str | None, index: str | None
) -> None:
    """With a limit no more rows become jobs than are shown; an index finds them in order, and no spec is asked for."""
    watch = Watch(store, monkeypatch)
    rows = job_list.job_rows(store, Selection(filters=filters, sort=sort, limit=5, now=NOW + 1000))
    assert (len(rows), watch.records) == (5, 5)
    asked, plan = watch.sent[0][0], watch.plans()[0]
    assert "jobs.spec," not in asked
    assert "TEMP B-TREE" not in plan
    assert index is None or f"INDEX {index}" in plan


def test_the_database_chooses_as_the_rows_would(either: Store) -> None:
    """Whatever of a selection the database does, the rows are those that pass the conditions in Python."""
    sorts = (None, "finished", "-finished", "elapsed", "-records_per_s", "hit")
    if not either._database.is_sqlite:
        sorts = sorts[3:5]  # each statement goes to a server
    everything = [job_row(job, NOW + 1000) for job in either.jobs.list()]
    for filters in (
        ["state=failed"],
        ["state!=failed", "priority>=1"],
        ["state=f*", "name=job-[23]"],
        ["name!=job-1", "error=null"],
        ["error!=null", "attempt=1"],
        ["created>800s", "records_done<1"],
        ["started=null", "kind=score"],
        ["finished<900s", "worker=w"],
        ["worker!=w", "device=cpu"],
        ["name=JOB-*"],
        ["name!=job-?", "error!=no*"],
        ["name=j?b-[1-3]*", "name!=job-[2]"],
        ["elapsed=3", "records_per_s>=700"],
        ["elapsed>2.5s", "elapsed<=8", "elapsed!=5"],
        ["hit=stored", "runs=s*"],
        ["hit=null", "records_per_s=null"],
        ["records_per_s<720.001", "created=2027-01-15"],
        ["created=2027-01-15T08:00:05"],
        ["created=2027-*", "created>=2027-01-15T08:00:30"],
    ):
        for sort in sorts:
            for limit in (None, 7):
                selection = Selection(filters=filters, sort=sort, limit=limit, now=NOW + 1000)
                expected = [row["id"] for row in selection.apply(everything, job_list.KEYS)]
                assert [row["id"] for row in job_list.job_rows(either, selection)] == expected, (filters, sort, limit)


def test_shorthands(either: Store) -> None:
    """since and until take ages and dates; text looks into names and errors, whatever their case."""

    def found(*filters: str) -> int:
        return len(job_list.job_rows(either, Selection(filters=filters, now=NOW + 100)))

    assert found("since=10s", "until=5s") == 6
    assert found("since=2027-01-15T08:00:00", "until=2027-01-15T08:00:09") == 10
    assert found("text=NO SUCH") == found("state=failed") == 10
    assert found("text=b-3") == found("name=job-3")
    assert found("text=100%") == found("text=_") == 0
    assert either.jobs.count([Match(column="text", compare="contains", value="no such")], NOW) == 10


def test_rows_of_jobs_that_run(either: Store) -> None:
    """What they have done a second, and how long they have run, are as of now, in the database and in the rows."""
    job = queued(either, spec=SPEC, name="now", kind="score", now=NOW, priority=99)
    taken = either.jobs.claim("w2", device="cpu", now=NOW + 50)
    assert taken is not None and taken.id == job.id  # noqa: PT018  # the other half is for the type checker
    either.jobs.progress(job.id, 1, done=20, total=40, bad=0)
    for filters in (["records_per_s=2", "state=running"], ["elapsed=10", "worker=w2"], ["records_per_s<3"]):
        rows = job_list.job_rows(either, Selection(filters=filters, now=NOW + 60))
        assert [row["id"] for row in rows] == [job.id]
    either.jobs.finish(job.id, 1, outputs={}, timings={"records_per_s": 8.0}, schedule={"hit": "miss"}, now=NOW + 70)
    (row,) = job_list.job_rows(either, Selection(filters=["hit=miss"], now=NOW + 80))
    assert (row["records_per_s"], row["elapsed_s"], row["hit"]) == (8.0, 20.0, "miss")


def test_many_rows_are_read_in_several_transactions(
    tmp_path: Path, url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is left out or doubled, in the order asked for, with a check in the rows or without."""
    monkeypatch.setattr("nimble_jobs.store.queries.AT_ONCE", 7)
    with open_store(resolve(str(tmp_path / "home")), url) as store:
        ids = many_jobs(store, 30, now=NOW)
        for filters, expected in (([], ids), (["created!=2020-01-01"], ids), (["state=q*"], [])):
            for limit in (None, 7, 8, 21):
                selection = Selection(filters=filters, sort="created", limit=limit, now=NOW)
                rows = [row["id"] for row in job_list.job_rows(store, selection)]
                assert rows == (expected or [i for n, i in enumerate(ids) if n % 10 in (1, 2, 3)])[:limit]


def test_errors_of_filters_name_the_allowed(cli: Cli) -> None:
    """The field that was found, and all that there are."""
    keys = ", ".join((*job_list.KEYS, "since", "until", "text"))
    for words, problem in (
        ("stat=failed", f"unknown key 'stat'; did you mean state? expected one of {keys}"),
        ("failed", f"'failed' is not a condition; expected KEY=VALUE, or !=, >, <, >=, <=; KEY is one of {keys}"),
        ("text>a", "text can only be compared with =; expected text=VALUE"),
        ("since!=7d", "since can only be compared with =; expected since=VALUE"),
        ("since=soon", "since: found 'soon'; expected an age such as 30d or a date such as 2026-01-31"),
        (
            "state=done",
            "state: found 'done'; expected one of queued, running, succeeded, failed, cancelled, quarantined",
        ),
    ):
        answer = cli("ls", "--filter", words)
        assert (answer.code, answer.err) == (2, f"nimble-jobs: --filter: {problem}\n")


def test_maintenance_reads_no_queue(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `ls` and an idle worker look for at each turn is found by an index, without reading the jobs that wait."""
    watch = Watch(store, monkeypatch)
    store.recover(NOW)
    store.jobs.retries_due(NOW)
    store.jobs.running()
    for plan in watch.plans():
        assert "SCAN jobs" not in plan


def test_a_quick_check_reads_the_newest_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A changed spec is found among them, and anywhere when every job is asked for; states are looked at in all."""
    cli = Cli(tmp_path / "home", capsys)
    with cli.store() as store:
        ids = many_jobs(store, 20, now=NOW)
        with store.jobs._db._engine.begin() as connection:
            connection.exec_driver_sql(f"UPDATE jobs SET spec = spec || ' ' WHERE id IN ('{ids[4]}', '{ids[15]}')")
            connection.exec_driver_sql(f"UPDATE jobs SET outputs = 'x', state = 'odd' WHERE id = '{ids[0]}'")
        odd = f"job {ids[0]}: state 'odd' is not one of {', '.join(JobState)}"
        new, old = (f"job {ids[n]}: its stored spec is damaged" for n in (15, 4))
        assert store.check(newest=5) == [odd, new]
        assert store.check() == [odd, new, old, f"job {ids[0]}: column outputs is damaged"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nimble_jobs.cli.doctor._NEWEST", 5)
        assert old not in cli("doctor", "--no-device").out
        assert old in cli("doctor", "--no-device", "--all").out


def test_doctor_counts(cli: Cli) -> None:
    """One is one."""
    with cli.store() as store:
        queue(store, "a")
    assert "ok\tstore\tsound: 1 job, 0 schedules" in cli("doctor", "--no-device").out.splitlines()


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path / "home", capsys)


def queue(store: Store, name: str, **more: Any) -> str:
    return queued(store, spec=SPEC, name=name, kind="score", now=time.time(), **more).id


def test_a_queued_job_says_why_it_waits(cli: Cli) -> None:
    """No worker, none for its device, another job, a time, or its turn: in `ls`, in `show` and in JSON."""
    store = cli.store()
    first = queue(store, "first")
    gpu = queue(store, "gpu", device="cuda:1")
    after = queue(store, "after", after=[first])
    later = queue(store, "later", not_before=time.time() + 600)
    start = "start one with: nimble-jobs worker start --detach"

    def said(*more: str) -> dict[str, str]:
        return {row["name"]: row["waits"] for row in cli("ls", "--json", *more).json}

    assert said()["first"] == f"no worker is running; {start}"
    assert said()["gpu"] == f"no worker for cuda:1 is running; {start} --device cuda:1"
    assert said()["after"] == f"waits for first {first} (queued)"
    assert said()["later"].startswith("held back until ")
    assert set(said("--filter", "waits=no worker*")) == {"first", "gpu"}
    with store.workers.hold({"role": "worker", "device": "cpu", "status": "ready"}) as lease:
        assert said()["gpu"] == f"no worker for cuda:1 is running (only on cpu); {start} --device cuda:1"
        assert said()["first"] == "a worker is about to take it"
        taken = store.jobs.claim(lease.id, device="cpu", now=time.time())
        assert taken is not None
        queue(store, "second")
        third = queue(store, "third")
        assert said() | {"later": ""} == said() | {"later": "", "first": None, "second": "the worker is busy"}
        shown = cli("show", third, "--json").json["waits"]
        assert shown == "the worker is busy; 2 queued jobs come first, by priority and age"
        assert f"job.waits: {shown}" in cli("show", third).out.splitlines()
        assert "the worker is busy" in cli("ls").out
    assert taken.state is JobState.RUNNING
    assert (gpu, after, later) != ("", "", "")
    store.close()
