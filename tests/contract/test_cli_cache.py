"""What the commands about stored schedules print and how they exit."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from nimble_jobs import __version__
from nimble_jobs.errors import StoreError
from nimble_jobs.job import Hit
from nimble_jobs.schedule import Candidate, GraphFacts, Plan, Program, Schedule
from nimble_jobs.store.home import DATABASE
from nimble_jobs.store.toolchain import toolchain
from nimble_jobs.task_times import TaskChoice, TaskTimes, task_key
from tests.cli import Cli
from tests.store_samples import a_schedule, key_of

KEY = "ab" * 32
OTHER = "cd" * 32
OLD = "ef" * 32
DAY_S = 86400
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
    store.schedules.set_residents("0-gone", {KEY: 1})
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
        store.schedules.set_residents(lease.id, {f"{OTHER}:seed:0": 1})
        rows = cli("cache", "ls", "--json").json
        assert [row["resident"] for row in rows] == [[], [lease.id]]
        assert [row["id"] for row in cli("worker", "ls", "--json").json] == [lease.id]
        assert cli("cache", "ls", "-q", "--filter", "resident=yes", "--filter", "state=ready").out.split() == [OTHER]
        assert [line.split("\t")[-2] for line in cli("cache", "ls").out.splitlines()[1:]] == ["ready", "resident"]
        store.schedules.quarantine(OTHER, "in doubt", time.time())
        assert cli("cache", "ls", "--filter", "resident=yes").out.splitlines()[1].split("\t")[-2] == (
            "quarantined, resident"
        )
    store.close()


def test_ls_selects(cli: Cli) -> None:
    """Durations and sizes compare with keys that hold microseconds and bytes."""
    assert cli("cache", "ls", "-q", "--filter", "replay_us<0.03ms").out.split() == [OTHER]
    assert cli("cache", "ls", "-q", "--filter", "bytes>1GiB").out == ""
    assert cli("cache", "ls", "-q", "--sort", "replay_us", "--limit", "1").out.split() == [OTHER]


def test_listings_load_no_torch(cli: Cli) -> None:
    """`ls`, `show`, `stats`, `size`, `verify` and `prune` answer without the seconds that torch takes."""
    lines = [["ls"], ["show", KEY], ["stats"], ["size"], ["verify"], ["prune", "--stale"]]
    code = (
        "import sys; from nimble_jobs.cli.main import main;"
        f"codes = [main(['--home', {str(cli.home)!r}, 'cache', *line]) for line in {lines!r}];"
        "print(codes, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0, 0, 0] False"


def test_ls_understands_units_and_ages(cli: Cli) -> None:
    """Units may be left out of a key's name; a duration beside a time is an age; the model is a pattern."""
    store = cli.store()
    store.schedules.save(schedule(OLD, 75.0), parts=PARTS | {"model.source": "timm:old"}, now=time.time() - 40 * DAY_S)
    store.schedules.touch(KEY, Hit.RESIDENT, time.time() - 2 * DAY_S)
    store.close()

    def listed(*conditions: str, sort: str = "key") -> list[str]:
        filters = [word for condition in conditions for word in ("--filter", condition)]
        return cli("cache", "ls", "-q", "--sort", sort, *filters).out.split()

    assert listed("used>30d") == [OLD]
    assert listed("used>1d", "used<30d") == [KEY]
    assert listed("created<1h") == [KEY, OTHER]
    assert listed("size>100MB") == []
    assert listed("size>100B", sort="-replay") == [OLD, KEY, OTHER]
    assert listed("replay<0.06ms") == [KEY, OTHER]
    assert listed("model=*:resnet*") == [KEY, OTHER]
    assert listed("device=a*") == [KEY, OTHER, OLD]
    assert listed("created>2020-01-01") == [KEY, OTHER, OLD]
    refused = cli("cache", "ls", "--filter", "siz=3")
    assert (refused.code, "did you mean bytes" in refused.err or "expected one of" in refused.err) == (2, True)


def test_ls_says_why_a_schedule_is_stale(cli: Cli) -> None:
    """One of another torch for this machine's processor is listed as stale, with the reason; prune removes it."""
    processors = toolchain().devices.get("cpu")
    if not processors:
        pytest.skip("this system does not name its processor")
    store = cli.store()
    parts = PARTS | {"device": "cpu", "device.name": min(processors), "torch": "0.1"}
    store.schedules.save(schedule(OLD, 75.0), parts=parts, now=time.time())
    store.close()
    (row,) = cli("cache", "ls", "--json", "--filter", "state=stale").json
    assert (row["key"], row["reason"].startswith("made with torch 0.1, here ")) == (OLD, True)
    assert cli("cache", "ls").err.startswith(f"stale ({OLD[:12]}): made with torch 0.1, here ")
    assert cli("cache", "stats", "--json").json["stale"] == 1
    removed = cli("cache", "prune", "--stale", "--yes", "--json").json
    assert [gone["key"] for gone in removed["schedules"]] == [OLD]
    assert cli("cache", "ls", "-q").out.split() == [KEY, OTHER]


def test_show_explains_the_key(cli: Cli) -> None:
    """The beginning of a key is enough; JSON holds the parts of the key, the graph and the candidates."""
    shown = cli("cache", "show", KEY[:8], "--json").json
    assert (shown["key"], shown["key_parts"]) == (KEY, PARTS)
    assert shown["graph"]["syncs_needed"] == shown["graph"]["meg_edges"] - shown["graph"]["matching"]
    assert [candidate["name"] for candidate in shown["candidates"]] == ["one stream"]
    out = cli("cache", "show", KEY[:8]).out
    assert "schedule.speed: replay 50.0µs, eager 100.0µs, 2.00× on a GPU" in out
    assert "candidates.one stream: 50.0µs, 0 B, error 0; chosen, the only one" in out


@pytest.mark.parametrize("where", ["schedules SET replay_us = 1", "schedule_texts SET text = replace(text, '0', '1')"])
def test_show_says_what_is_damaged(cli: Cli, where: str) -> None:
    """A changed row or text: its state and the reason are shown, and nothing is written; a job would quarantine it."""
    with closing(sqlite3.connect(cli.home / DATABASE, isolation_level=None)) as connection:
        connection.execute(f"UPDATE {where} WHERE key = ?", (KEY,))
    out = cli("cache", "show", KEY).out
    assert "schedule.state: damaged\n" in out
    assert "schedule.reason: damaged: its bytes have changed since they were stored (SHA-256); the next job" in out
    shown = cli("cache", "show", KEY, "--json").json
    assert (shown["state"], shown["key_parts"], "candidates" in shown) == ("damaged", PARTS, False)
    assert [row["state"] for row in cli("cache", "ls", "--json").json] == ["ready", "ready"]
    store = cli.store()
    assert store.jobs.events() == ()
    store.schedules.lookup(KEY)
    store.close()
    shown = cli("cache", "show", KEY, "--json").json
    assert (shown["state"], shown["reason"].count("damaged")) == ("quarantined", 1)


def test_show_of_a_quarantined_schedule(cli: Cli) -> None:
    """Its reason, and all that is sound of it."""
    store = cli.store()
    store.schedules.refuse(KEY, "differs by 0.5", time.time())
    store.close()
    shown = cli("cache", "show", KEY, "--json").json
    assert (shown["state"], shown["reason"]) == ("quarantined", "differs by 0.5")
    assert [candidate["name"] for candidate in shown["candidates"]] == ["one stream"]


def test_show_tells_origin_and_artifacts(cli: Cli) -> None:
    """What built it, when and in how long, with which software; its artifacts with sizes, and those that are gone."""
    store = cli.store()
    parts = PARTS | {"torch": "2.11.0", "driver": "580.1"}
    store.schedules.save(a_schedule(OLD, constant=b"constant", build_s=2.5), parts=parts, now=time.time())
    store.close()
    shown = cli("cache", "show", OLD, "--json").json
    assert shown["build_s"] == 2.5
    assert shown["provenance"].items() >= {"nimble_jobs": __version__, "torch": "2.11.0", "driver": "580.1"}.items()
    (artifact,) = shown["artifacts"]
    assert (artifact["kind"], artifact["bytes"], artifact["stored"]) == ("constant", 8, False)
    assert f"artifacts.{artifact['name'][:16]}: constant, 8 B, missing" in cli("cache", "show", OLD).out


def test_show_says_which_artifact_is_damaged(cli: Cli) -> None:
    """One whose bytes are others, or that is gone, makes the schedule damaged; to show it changes nothing."""
    store = cli.store()
    name = store.artifacts.put(b"constant")
    store.schedules.save(a_schedule(OLD, constant=b"constant"), parts=PARTS, now=time.time())
    store.close()
    sound = cli("cache", "show", OLD, "--json").json
    assert (sound["state"], sound["artifacts"][0]["damage"]) == ("ready", None)
    path = cli.home / "artifacts" / name[:2] / name
    path.write_bytes(b"constanT")
    out = cli("cache", "show", OLD).out
    assert "schedule.state: damaged\n" in out
    assert (
        "its bytes have changed (the SHA-256 differs from the name); the next job that needs it quarantines it" in out
    )
    assert f"artifacts.{name[:16]}: constant, 8 B, damaged\n" in out
    path.unlink()
    gone = cli("cache", "show", OLD, "--json").json
    assert (gone["state"], gone["reason"].startswith(f"artifact {name}: is not stored; ")) == ("damaged", True)
    assert [row["state"] for row in cli("cache", "ls", "--json").json] == ["ready"] * 3


def test_a_check_says_a_thing_once(cli: Cli) -> None:
    """A folder of artifacts that others can write to, found by whoever reads one and by whoever looks at folders."""
    store = cli.store()
    name = store.artifacts.put(b"constant")
    folder = cli.home / "artifacts" / name[:2]
    folder.chmod(0o777)
    assert store.check() == [f"{folder}: others can write to it (mode 0777)"]
    store.close()


def test_measured_tasks_are_counted_shown_and_pruned(cli: Cli) -> None:
    """A schedule says which way each kind of task runs, and for which model that was measured."""
    times = TaskTimes(task="a product", times_us=(("library", 2.0), ("ours", 1.5)), chosen="ours")
    earlier = replace(times, measured_for="zoo:first", measured_at=1_800_000_000.0)
    made = replace(schedule(OLD, 75.0), choices=(TaskChoice(times=earlier, tasks=3), TaskChoice(times=times, tasks=1)))
    with cli.store() as store:
        store.schedules.save(made, parts=PARTS, now=time.time())
        store.task_times.save({task_key({"task": "p"}): ({"task": "p"}, times)}, time.time() - 40 * DAY_S)
    tasks = [line for line in cli("cache", "show", OLD).out.splitlines() if line.startswith("tasks.")]
    assert tasks == [
        "tasks.a product: 3 tasks, ours 1.5µs, not library 2.0µs; measured for zoo:first on 2027-01-15",
        "tasks.a product: 1 task, ours 1.5µs, not library 2.0µs; measured by this build",
    ]
    assert cli("cache", "show", OLD, "--json").json["choices"][0]["times"]["measured_for"] == "zoo:first"
    assert cli("cache", "stats", "--json").json["task_times"] == 1
    assert cli("cache", "prune", "--unused-for", "30d", "--yes", "--json").json["task_times"] == 1
    assert cli("cache", "stats", "--json").json["task_times"] == 0


def test_stats_counts(cli: Cli) -> None:
    """States, hits by kind, misses by reason, and the build time that hits saved; removing schedules forgets no use."""
    store = cli.store()
    for hit in (Hit.STORED, Hit.RESIDENT, Hit.RESIDENT):
        store.schedules.touch(KEY, hit, time.time())
    store.schedules.missed("the stored schedule was not used: bad", time.time())
    store.close()
    stats = cli("cache", "stats", "--json").json
    assert (stats["schedules"], stats["ready"], stats["hits"], stats["resident_hits"]) == (2, 2, 3, 2)
    assert stats["uses"] == {"resident": 2, "stored": 1, "miss": 1, "total": 4}
    assert stats["misses"] == {"the stored schedule was not used": 1}
    assert stats["saved_s"] == 1.5
    assert "uses.resident: 2 of 4, 50.0 %" in cli("cache", "stats").out
    cli("cache", "rm", KEY, "--yes")
    after = cli("cache", "stats", "--json").json
    assert (after["schedules"], after["hits"], after["uses"], after["saved_s"]) == (1, 0, stats["uses"], 1.5)


def test_size(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes by where they are, with the limit that is set."""
    sizes = cli("cache", "size", "--json").json
    assert sizes["database_bytes"] > sizes["schedules_bytes"] > 0
    assert sizes["limit_bytes"] is None
    monkeypatch.setenv("NIMBLE_JOBS_CACHE_SIZE", "10GB")
    assert cli("cache", "size", "--json").json["limit_bytes"] == 10**10
    assert "limit      9.3 GiB for schedules" in cli("cache", "size").out
    monkeypatch.setenv("NIMBLE_JOBS_CACHE_SIZE", "much")
    refused = cli("cache", "size")
    assert (refused.code, "NIMBLE_JOBS_CACHE_SIZE: cache.size: found 'much'" in refused.err) == (2, True)


def test_dir(cli: Cli) -> None:
    """The state folder, for scripts."""
    assert cli("cache", "dir").out == f"{cli.home}\n"


def test_rm_asks_first(cli: Cli) -> None:
    """With --dry-run, or where nobody can answer, nothing is removed; with --yes it is."""
    assert cli("cache", "rm", KEY[:8], "--dry-run").code == 0
    refused = cli("cache", "rm", KEY[:8])
    assert (refused.code, "--yes" in refused.err) == (2, True)
    assert len(cli("cache", "ls", "--json").json) == 2
    assert cli("cache", "rm", KEY[:8], "--yes").code == 0
    assert cli("cache", "ls", "-q").out.split() == [OTHER]


def test_rm_refuses_what_a_worker_holds(cli: Cli) -> None:
    """The worker would lose what it holds; --force removes it all the same."""
    store = cli.store()
    with store.workers.hold({"role": "worker", "device": "cpu"}) as lease:
        store.schedules.set_residents(lease.id, {KEY: 1})
        refused = cli("cache", "rm", KEY, OTHER, "--yes")
        assert (refused.code, KEY[:12] in refused.err, "--force" in refused.err) == (2, True, True)
        assert len(cli("cache", "ls", "--json").json) == 2, "neither was removed"
        assert cli("cache", "rm", KEY, "--yes", "--force").code == 0
    store.close()
    assert cli("cache", "ls", "-q").out.split() == [OTHER]


def test_rm_names_what_it_does_not_know(cli: Cli) -> None:
    """One unknown key among others: nothing is removed."""
    refused = cli("cache", "rm", KEY, "ef" * 32, "--yes")
    assert refused.code == 102
    assert len(cli("cache", "ls", "--json").json) == 2


def test_prune_asks_first(cli: Cli) -> None:
    """Like rm: --dry-run changes nothing, and without --yes nobody is taken to have agreed."""
    wish = ("cache", "prune", "--max-size", "1B")
    assert cli(*wish, "--dry-run").err.splitlines()[-1].startswith("would remove 2 schedules")
    assert cli(*wish).code == 2
    assert len(cli("cache", "ls", "--json").json) == 2
    assert cli(*wish, "--dry-run", "--json").json["removed"] is False
    assert cli(*wish, "--yes").code == 0
    assert cli("cache", "ls", "--json").json == []
    assert cli("cache", "prune").err == "nothing to remove\n"
    assert cli("cache", "prune", "--unused-for", "soon").code == 2


def test_prune_makes_the_database_smaller(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file shrinks by what went. Where it cannot, while somebody writes say, that is told, and is no failure."""
    store = cli.store()
    for name in ("a", "b"):
        store.schedules.save(a_schedule(key_of(name), tasks=2000), parts=PARTS, now=1.0)
    store.close()
    before = (cli.home / DATABASE).stat().st_size
    pruned = cli("cache", "prune", "--unused-for", "30d", "--yes")
    assert (pruned.code, len(pruned.lines)) == (0, 3)
    assert (cli.home / DATABASE).stat().st_size < before / 2
    monkeypatch.setattr("nimble_jobs.store.database.Database.compact", _locked)
    said = cli("cache", "prune", "--max-size", "1B", "--yes")
    assert (said.code, said.lines[-1]) == (0, "the database's file did not shrink: locked by another process")
    assert cli("cache", "ls", "-q").out == ""


def _locked(_database: object) -> None:
    raise StoreError("locked by another process")


def test_verify_exits_100_where_not_all_is_sound(cli: Cli) -> None:
    """All sound: 0. A changed row: 100, until it is built again or pruned; the first time it says that it is new."""
    assert cli("cache", "verify").code == 0
    with closing(sqlite3.connect(cli.home / DATABASE, isolation_level=None)) as connection:
        connection.execute("UPDATE schedules SET replay_us = 1 WHERE key = ?", (KEY,))
    found = cli("cache", "verify", "--json")
    assert found.code == 100
    assert {row["key"]: (row["sound"], row["quarantined_now"]) for row in found.json} == {
        KEY: (False, True),
        OTHER: (True, False),
    }
    assert cli("cache", "verify", OTHER[:8]).code == 0
    again = cli("cache", "verify")
    head = f"{KEY[:12]}  torchvision:resnet18 4×3×32×32  quarantined before: "
    assert (again.code, again.out.startswith(head), again.out.count("quarantined")) == (100, True, 1)
    assert again.lines[0].startswith("1 of 2 schedules sound, ")
    assert again.lines[1].startswith("nimble-jobs: 1 of 2 schedules not sound; ")
    assert cli("cache", "prune", "--quarantined", "--yes").code == 0
    assert cli("cache", "verify").code == 0
    assert cli("cache", "verify", "ef" * 32).code == 102
