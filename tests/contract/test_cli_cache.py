"""What the commands about stored schedules print and how they exit."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from nimble_jobs.schedule import Candidate, GraphFacts, Plan, Program, Schedule
from tests.cli import Cli

KEY = "ab" * 32
OTHER = "cd" * 32
ROW = {
    *("key", "model", "device", "input", "dtype", "mode", "streams", "syncs", "replay_us", "eager_us", "bytes", "hits"),
    *("created_at", "last_used_at", "state", "resident"),
}
PARTS = {
    "model.source": "torchvision:resnet18",
    "model.dtype": "fp32",
    "mode": "inference",
    "input": "x:float32[4, 3, 32, 32]",
}


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    """A state folder with two schedules; a worker that runs no more said that it held one of them."""
    cli = Cli(tmp_path / "home", capsys)
    store = cli.store()
    for key, replay_us in ((KEY, 50.0), (OTHER, 25.0)):
        store.schedules.save(schedule(key, replay_us), parts=PARTS, now=time.time())
    store.schedules.set_residents("0-gone", [KEY])
    store.close()
    return cli


def schedule(key: str, replay_us: float) -> Schedule:
    """A schedule of no task."""
    counts = {"tasks": 0, "edges": 0, "meg_edges": 0, "matching": 0, "width": 0, "streams": 1}
    candidate = Candidate(
        name="one stream",
        replay_us=replay_us,
        records_per_s=None,
        peak_bytes=0,
        error=0.0,
        chosen=True,
        reason="the only one",
    )
    return Schedule(
        key=key,
        program=Program(buffers=(), tasks=(), inputs=(), outputs=(), state=(), constants=()),
        plan=Plan(order=(), stream_of=(), syncs=()),
        facts=GraphFacts(**counts, syncs_needed=0, syncs_used=0),
        candidates=(candidate,),
        tolerance=1e-3,
        error=0.0,
        device="a GPU",
        eager_us=100.0,
        replay_us=replay_us,
        peak_bytes=2048,
        build_s=0.5,
        durations_us=(),
    )


def test_ls_rows_hold_what_was_promised(cli: Cli) -> None:
    """Every row has the keys of the contract; what a dead worker held is not resident."""
    rows = cli("cache", "ls", "--json").json
    assert [row["key"] for row in rows] == [KEY, OTHER]
    for row in rows:
        assert set(row) >= ROW
        assert (row["state"], row["model"], row["dtype"]) == ("ready", "torchvision:resnet18", "fp32")
        assert row["resident"] == []


def test_ls_shows_what_a_live_worker_holds(cli: Cli) -> None:
    """A schedule whose graph a running worker holds names that worker."""
    store = cli.store()
    with store.workers.hold({"role": "worker", "device": "cpu"}) as lease:
        store.schedules.set_residents(lease.id, [f"{OTHER}:seed:0"])
        rows = cli("cache", "ls", "--json").json
        assert [row["resident"] for row in rows] == [[], [lease.id]]
        assert [row["id"] for row in cli("worker", "ls", "--json").json] == [lease.id]
    store.close()


def test_ls_selects(cli: Cli) -> None:
    """Durations and sizes compare with keys that hold microseconds and bytes."""
    assert cli("cache", "ls", "-q", "--filter", "replay_us<0.03ms").out.split() == [OTHER]
    assert cli("cache", "ls", "-q", "--filter", "bytes>1GiB").out == ""
    assert cli("cache", "ls", "-q", "--sort", "replay_us", "--limit", "1").out.split() == [OTHER]


def test_show_explains_the_key(cli: Cli) -> None:
    """The beginning of a key is enough; JSON holds the parts of the key, the graph and the candidates."""
    shown = cli("cache", "show", KEY[:8], "--json").json
    assert (shown["key"], shown["key_parts"]) == (KEY, PARTS)
    assert shown["graph"]["syncs_needed"] == shown["graph"]["meg_edges"] - shown["graph"]["matching"]
    assert [candidate["name"] for candidate in shown["candidates"]] == ["one stream"]
    out = cli("cache", "show", KEY[:8]).out
    assert "schedule.speed: replay 50.0µs, eager 100.0µs, 2.00× on a GPU" in out


def test_stats_counts(cli: Cli) -> None:
    """How many schedules there are, by state, and their hits."""
    stats = cli("cache", "stats", "--json").json
    assert (stats["schedules"], stats["ready"], stats["hits"]) == (2, 2, 0)


def test_rm_asks_first(cli: Cli) -> None:
    """With --dry-run, or where nobody can answer, nothing is removed; with --yes it is."""
    assert cli("cache", "rm", KEY[:8], "--dry-run").code == 0
    refused = cli("cache", "rm", KEY[:8])
    assert (refused.code, "--yes" in refused.err) == (2, True)
    assert len(cli("cache", "ls", "--json").json) == 2
    assert cli("cache", "rm", KEY[:8], "--yes").code == 0
    assert cli("cache", "ls", "-q").out.split() == [OTHER]
