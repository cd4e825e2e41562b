"""On which machine workers are, in a database that several machines share."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from nimble_jobs.cli import output
from nimble_jobs.cli.listing import _shown, _widths
from nimble_jobs.cli.worker import columns_of
from nimble_jobs.store import Store
from nimble_jobs.views.workers import worker_rows
from tests import postgres
from tests.cli import Cli

FAR = "gpu-17.cluster.example.org"


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    with postgres.schema() as url:
        monkeypatch.setenv("NIMBLE_JOBS_DB", url)
        yield Cli(tmp_path / "home", capsys)


def move_away(store: Store, worker: str, *, silent_s: float = 0.0) -> None:
    """The worker is on another machine, and last renewed its lease so long ago."""
    change = text("UPDATE workers SET host = :host, boot = 'b', lease_until = lease_until - :s WHERE id = :id")
    given = {"host": FAR, "s": silent_s, "id": worker}
    store.jobs._db.write(lambda session: session.execute(change, given))


def test_worker_ls_names_the_host(shared: Cli) -> None:
    """As a column without the domain, and whole in JSON, by which rows can be filtered."""
    with (
        shared.store() as store,
        store.workers.hold({"role": "worker"}) as near,
        store.workers.hold({"role": "worker"}) as far,
    ):
        move_away(store, far.id)
        hosts = {row["id"]: row["host"] for row in shared("worker", "ls", "--json").json}
        assert hosts == {near.id: socket.gethostname(), far.id: FAR}
        listed = shared("worker", "ls").out.splitlines()
        assert listed[0].split("\t")[:3] == ["ID", "HOST", "PID"]
        assert {line.split("\t")[1] for line in listed[1:]} == {"gpu-17", socket.gethostname().partition(".")[0]}
        assert shared("worker", "ls", "-q", "--filter", f"host={FAR}").out.split() == [far.id]


@pytest.mark.parametrize(("width", "pid"), [(80, False), (100, True), (120, True)])
def test_the_host_fits_on_a_terminal(width: int, pid: bool, shared: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a busy worker that makes no progress; on a narrow one the process id gives way, as it says less."""
    with shared.store() as store, store.workers.hold({"role": "worker", "device": "cuda:15"}) as far:
        move_away(store, far.id)
        (row,) = worker_rows(store)
        row |= {"job": "2n1dq3xq9jnj", "phase": "measuring", "progress_s": 3540.0, "up_s": 50_000.0, "pid": 1234567}
        shown = _shown([row], columns_of([row]), width)
        assert sum(_widths([row], shown, width)) + 2 * (len(shown) - 1) <= width
        assert ("PID" in [each.header for each in shown]) is pid
        monkeypatch.setattr(output, "on_terminal", lambda: True)
        monkeypatch.setenv("COLUMNS", str(width))
        head, line = shared("worker", "ls").out.splitlines()
        assert "HOST" in head
        assert "gpu-17" in line


def test_on_sqlite_all_workers_are_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli = Cli(tmp_path / "home", capsys)
    with cli.store() as store, store.workers.hold({"role": "worker"}):
        assert "HOST" not in cli("worker", "ls").out
        assert [row["host"] for row in cli("worker", "ls", "--json").json] == [None]


def test_doctor_says_where_a_silent_worker_is(shared: Cli) -> None:
    """It may be dead, which nobody can tell before its lease ends; a signal to its process id means something there."""
    with shared.store() as store, store.workers.hold({"role": "worker", "device": "cpu"}) as far:
        move_away(store, far.id)
        told = shared("doctor", "--no-device").out
        assert "no sign of life" not in told
        assert f"{far.id} on cpu of {FAR}" in told
        move_away(store, far.id, silent_s=30.0)
        told = " ".join(shared("doctor", "--no-device").out.split())
        named = f"worker {far.id} (process {far.info['pid']} on {FAR})"
        assert re.search(rf"{re.escape(named)} has given no sign of life for \d+ ?s:", told), told
        assert "stopped, cut off or dead, which shows once its lease ends, 1m after the last sign" in told
        assert f"(kill -KILL) on {FAR}" in told
