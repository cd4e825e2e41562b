"""`worker start --ray` with options, addresses and nodes that cannot be used. No cluster is needed."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nimble_jobs.errors import NimbleError, UsageError
from nimble_jobs.ray import member, workers
from nimble_jobs.ray.order import Order, Versions
from nimble_jobs.store import open_store
from nimble_jobs.store.home import resolve
from tests.cli import Cli
from tests.waiting import PATIENCE_S, until

pytest.importorskip("ray", reason="needs the extra ray")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    found = resolve(str(tmp_path / "home"))
    open_store(found).close()
    return found


@pytest.fixture
def start(home: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What the command refuses with, after `nimble-jobs: `."""

    def begin(*given: str, code: int = 2) -> str:
        done = Cli(home, capsys)("worker", "start", *given)
        assert (done.code, done.out) == (code, "")
        return done.err.removeprefix("nimble-jobs: ").rstrip()

    return begin


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--gpus", "2"], "--gpus: found it without --ray; expected --ray ADDRESS, too"),
        (["--node-home", "/x"], "--node-home: found it without --ray; expected --ray ADDRESS, too"),
        (["--ray", "auto", "--gpus", "0"], "--gpus: found 0; expected a number from 1 to 4096"),
        (["--ray", "auto", "--detach"], "--detach: found it with --ray; expected this command to go on running"),
        (["--ray", "auto", "--device", "cpu"], "--device: found it with --ray; expected --gpus N, or --devices cpu"),
        (["--ray", "auto", "--devices", "cuda:0"], "--devices: found 'cuda:0' with --ray, which chooses the GPUs"),
        (["--ray", "auto", "--devices", "cpu", "--gpus", "1"], "--gpus and --devices: found both; expected one"),
        (
            ["--ray", "auto", "--node-home", "/x"],
            "--node-home: found a state folder for each node; expected jobs in Po",
        ),
        (["--ray", "here"], "--ray: found 'here'; expected HOST:PORT, or auto on a node of the cluster"),
        (["--ray", "a:0"], "--ray: found 'a:0'; expected HOST:PORT"),
        (["--ray", "ray://a:1"], "Ray's client (ray://) is not used: start the workers on a node"),
    ],
)
def test_options(start: Callable[..., str], given: list[str], said: str) -> None:
    """Each message names the option, and what was expected."""
    assert said in start(*given)


def test_ray_is_not_installed(start: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the extra."""
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else there(name))
    assert start("--ray", "auto") == "--ray: Ray is not installed; install it with: pip install 'nimble-jobs[ray]'"


def test_nothing_listens(start: Callable[..., str]) -> None:
    """The command does not wait for minutes, as Ray does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        said = start("--ray", address, code=1)
    assert said.startswith(f"--ray: {address}: Connection refused (waited at most 5 s); expected the address of a Ray")


def test_what_listens_is_no_ray(start: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts the connection and says nothing: the wait is bounded, and no traceback is shown."""
    monkeypatch.setattr(workers, "CONNECT_S", 2.0)
    monkeypatch.setattr(workers, "LAST_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        said = start("--ray", f"127.0.0.1:{silent.getsockname()[1]}", code=1)
    assert "did not answer as a Ray cluster within 2 s; expected the address of its head node" in said
    assert "Traceback" not in said


def test_a_cluster_that_vanishes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a server has not answered for GONE_S, and not after a single failure."""
    clock = [0.0]
    monkeypatch.setattr(workers.time, "monotonic", lambda: clock[0])
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        pulse = workers.Pulse([("127.0.0.1", port)])
        clock[0] = 100.0
        assert not pulse.lost()
    for at, lost in ((110.0, False), (159.0, False), (165.0, True)):
        clock[0] = at
        assert pulse.lost() is lost


@pytest.fixture
def order(home: Path) -> Order:
    return workers.order_of(home, address="auto", cpus=1)


def test_an_order_arrives_as_it_was_sent(order: Order) -> None:
    """With and without a SQLite file."""
    for each in (order, replace(order, sqlite=None, database="postgresql+psycopg://a@b/c", count=None)):
        assert Order.load(each.dump()) == each


def test_nodes_that_cannot_be_used(order: Order, tmp_path: Path) -> None:
    """Another machine, another folder, other versions; each is named with what was expected."""
    member.refuse_misfit(order)
    assert order.sqlite is not None
    other = resolve(str(tmp_path / "other"))
    open_store(other).close()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"sqlite": replace(order.sqlite, boot="x")}, "found another machine than that of the state folder; expected"),
        ({"home": str(other)}, "found another state folder, or none, at .*other; expected the same one"),
        ({"home": str(tmp_path / "none")}, "found another state folder, or none, at .*none.*PostgreSQL"),
        ({"versions": replace(order.versions, python="3.10")}, r"found python 3\.1\d, expected 3\.10; all nodes"),
        ({"versions": replace(order.versions, torch="1", ray="2")}, "torch .*, expected 1; ray .*, expected 2; all"),
    ]
    for change, message in wrong:
        with pytest.raises(UsageError, match=message):
            member.refuse_misfit(replace(order, **change))
    # With PostgreSQL, folders and machines differ.
    member.refuse_misfit(replace(order, sqlite=None, home=str(tmp_path / "none")))


def test_a_node_says_which_it_is(order: Order) -> None:
    """What an actor's worker is refused for reaches the command with the node's name."""
    ended = member.Member(replace(order, versions=Versions(python="2", nimble_jobs="2", torch="2", ray="2"))).run()
    assert ended.code == 2
    assert ended.reason.startswith(f"node {socket.gethostname()}: found python ")


def test_passwords_stay_on_their_nodes(home: Path, order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order holds the database's address without the password; a node's own password for it stays in use."""
    monkeypatch.setenv("NIMBLE_JOBS_DB", "postgresql+psycopg://me:secret@host/jobs")
    shared = workers.order_of(home, address="auto", node_home="/local/jobs")
    assert "secret" not in shared.dump()
    assert (shared.database, shared.sqlite, shared.home) == ("postgresql+psycopg://me@host/jobs", None, "/local/jobs")
    own = {"NIMBLE_JOBS_DB": "postgresql+psycopg://me:other@host/jobs"}
    assert member.environment(shared, own)["NIMBLE_JOBS_DB"] == own["NIMBLE_JOBS_DB"]
    elsewhere = {"NIMBLE_JOBS_DB": "postgresql+psycopg://me:other@elsewhere/jobs"}
    assert member.environment(shared, elsewhere)["NIMBLE_JOBS_DB"] == shared.database
    assert "NIMBLE_JOBS_DB" not in member.environment(order, own)


def test_a_cut_off_driver_is_an_error(home: Path, order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray ends its process in ways that no code of ours sees."""
    monkeypatch.setattr(workers.sys, "executable", "/bin/true")
    with pytest.raises(NimbleError, match=r"Ray did not start \(auto\)"):
        workers.run(home, order)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [([], (0, "")), ([1, 0], (0, "")), ([1, 1], (1, "0")), ([1, 2, 2], (2, "1")), ([0, 2], (2, "1"))],
)
def test_how_all_workers_end(codes: list[int], expected: tuple[int, str]) -> None:
    """The reason is that of the first worker with the code that counts."""
    ends = [member.Ended(code=code, reason=str(number) if code else "") for number, code in enumerate(codes)]
    assert member.verdict(ends) == expected


class Died(BaseException):
    """The actor's process ended itself."""


def member_of(order: Order, monkeypatch: pytest.MonkeyPatch, script: str) -> member.Member:
    """An actor whose worker is a shell script."""

    def end(code: int) -> None:
        raise Died(code)

    monkeypatch.setattr(member, "command", lambda _order: ["/bin/sh", "-c", script])
    monkeypatch.setattr(member.os, "_exit", end)
    return member.Member(order)


def test_how_a_worker_ends(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever kills it ends the actor, too, which Ray starts again. All other ends are the worker's own."""
    assert member_of(order, monkeypatch, "exit 0").run() == member.Ended(code=0)
    ended = member_of(order, monkeypatch, "echo 2026 ERROR cuda:0 is not there >&2; exit 2").run()
    assert ended.code == 2
    assert ended.reason.startswith(f"node {socket.gethostname()}: cuda:0 is not there ({order.home}/logs/worker-")
    with pytest.raises(Died):
        member_of(order, monkeypatch, "kill -9 $$").run()


def test_stopping_an_actor(order: Order, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks the worker; a worker that has not started yet never does."""
    before = member_of(order, monkeypatch, "exit 3")
    before.stop()
    assert before.run() == member.Ended(code=0)
    script = f"trap 'exit 0' TERM; touch {home}/ready; while :; do sleep 0.05; done"
    actor = member_of(order, monkeypatch, script)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(actor.run)
        until((home / "ready").exists)
        actor.stop()
        assert running.result(timeout=PATIENCE_S) == member.Ended(code=0)
