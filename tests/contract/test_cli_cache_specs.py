"""Commands about the schedules that specs ask for, on real models: why, build, verify --replay, export, import."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import prefork
from tests.cli import Cli, beside

NET = """
from torch import nn

from blocks import Block


def net():
    return nn.Sequential(Block(), nn.Linear(4, 3))
"""
BLOCKS = """
from torch import nn


class Block(nn.Module):
    def forward(self, x):
        return x.relu() + 1
"""
SPEC = """\
version: 1
name: net
kind: score
model: {source: "python:net.py:net"}
input: {source: x.npy, format: npy, batch_size: 2}
output: {path: out, format: npy, fields: [id, top1]}
run: {device: cpu}
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """A spec whose model is made of two files."""
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "blocks.py").write_text(BLOCKS)
    np.save(tmp_path / "x.npy", np.zeros((6, 4), dtype=np.float32))
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    return path


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, spec: Path) -> Cli:
    return beside(spec, tmp_path / "home", capsys, monkeypatch)


def test_build_ahead_then_run(cli: Cli, spec: Path) -> None:
    """Each batch size gets its schedule, once; no job is queued; the job that comes finds a stored hit."""
    made = cli("cache", "build", spec, "--batch-size", "1,2", "--batch-size", "3", "--json").json
    assert [(each["input"], each["hit"], each["fallback"]) for each in made] == [
        (f"x:float32[{size}, 4]", False, None) for size in (1, 2, 3)
    ]
    assert all(each["build_s"] > 0 and each["replay_us"] > 0 for each in made)
    rows = cli("cache", "ls", "--json").json
    assert [row["key"] for row in rows] == [each["key"] for each in made]
    assert rows[0]["build_s"] == made[0]["build_s"]
    again = cli("cache", "build", spec, "--batch-size", "2,4")
    assert [line.split()[2].rstrip(",") for line in again.out.splitlines()] == ["hit", "built"]
    assert made[0]["device"] in again.out, "a measured time stands beside its device"
    assert cli("ls", "--json").json == []
    assert cli("run", spec, "--json").json["schedule"]["hit"] == "stored"


def test_build_says_what_a_size_cap_took_away(cli: Cli, spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be it from before or of the same command, in the order in which it went."""
    (old,) = cli("cache", "build", spec, "--batch-size", "1", "--json").json
    assert cli("cache", "build", spec, "--batch-size", "1", "-q").lines == []
    monkeypatch.setenv("NIMBLE_JOBS_CACHE_SIZE", "1B")
    answer = cli("cache", "build", spec, "--batch-size", "2,3", "-q", "--json")
    first, second = (each["key"] for each in answer.json)
    went = f"cache.size: removed 2 schedules, least recently used: {old['key'][:12]}, {first[:12]}"
    assert (answer.code, answer.lines) == (0, [went])
    assert cli("cache", "ls", "-q").out.split() == [second]


def test_explain_and_build_agree_with_the_worker_that_will_run(cli: Cli, spec: Path) -> None:
    """A worker's limit is part of the key: explained with it, a schedule is the one that was built with it."""
    (made,) = cli("cache", "build", spec, "--gpu-memory", "1GiB", "--json").json
    limited = cli("explain", spec, "--gpu-memory", "1GiB", "--json").json
    assert (limited["key"], limited["hit"]) == (made["key"], "stored")
    assert limited["key_parts"]["schedule.memory_bytes"] == str(2**30)
    assert cli("explain", spec, "--no-build", "--json").json["hit"] == "miss"
    assert len(cli("cache", "ls", "--json").json) == 1
    assert cli("explain", spec, "--gpu-memory", "much").code == 2


def test_kernels_that_are_off_are_told(cli: Cli, spec: Path) -> None:
    """By `explain`, in text and JSON; they make another key, and `cache why` says how it differs, in words."""
    off = ("schedule.kernels.split-k=false", "schedule.kernels.attention=false", "schedule.kernels.patches=true")
    (plain,) = cli("cache", "build", spec, "--json").json
    assert cli("explain", spec, "--json").json["switched_off"] == []
    assert "switched off" not in cli("explain", spec).out
    missed = cli("explain", spec, *off, "--no-build", "--json").json
    assert (missed["hit"], missed["switched_off"]) == ("miss", ["attention", "split-k"])
    said = "differs from the nearest stored key.schedule.kernels: "
    assert f"{said}without attention, split-k; stored: with all\n" in cli("cache", "why", spec, *off).out
    assert "schedule.switched off: attention, split-k\n" in cli("explain", spec, *off).out
    built = cli("explain", spec, *off, "--json").json
    assert (built["hit"], built["key_parts"]["schedule.kernels"]) == ("stored", "without attention, split-k")
    assert built["key"] != plain["key"]
    cli("cache", "rm", plain["key"], "--yes")
    assert f"{said}with all; stored: without attention, split-k\n" in cli("cache", "why", spec).out
    assert cli("cache", "verify", "--replay").code == 0
    assert cli("run", spec, *off, "--json").json["schedule"]["hit"] == "stored"


def test_a_build_is_followed_on_stderr(cli: Cli, spec: Path) -> None:
    """Without a terminal each thing that is done is a line, with --quiet none; stdout holds the answer alone."""
    kernels = ("eager kernels", "oneDNN kernels over packed weights")
    tried = [f"trying {each}{plan}" for each in kernels for plan in ("", ", 1 stream")]
    told = ["loading the model", "measuring eager", *tried]
    explained = cli("explain", spec, "--json")
    assert (explained.code, explained.lines, explained.json["hit"]) == (0, told, "miss")
    sizes = cli("cache", "build", spec, "--batch-size", "2,3", "--json")
    assert sizes.lines == [f"2 of 2: {line}" for line in told], "the first is stored"
    quiet = cli("cache", "build", spec, "--batch-size", "4", "--quiet", "--json")
    assert (quiet.code, quiet.lines, quiet.json[0]["hit"]) == (0, [], False)
    assert cli("explain", spec, "input.batch_size=5", "-q").lines == []


def test_on_a_terminal_progress_is_one_line_that_vanishes(cli: Cli, spec: Path) -> None:
    """It is drawn where stderr is a terminal; what goes to stdout still gets there, whatever that is."""
    reader, screen = os.openpty()
    args = [sys.executable, "-m", "nimble_jobs.cli.main", "--home", str(cli.home), "cache", "build", str(spec)]
    with prefork.start(args, stdout=subprocess.PIPE, stderr=screen, env=os.environ | {"TERM": "xterm"}) as process:
        os.close(screen)
        drawn = b""
        with contextlib.suppress(OSError):  # the other end was closed
            while data := os.read(reader, 4096):
                drawn += data
        assert process.stdout is not None
        out = process.stdout.read().decode()
    os.close(reader)
    assert process.returncode == 0, drawn
    assert " built in " in out, drawn
    assert b"trying oneDNN kernels" in drawn
    assert drawn.rstrip().endswith(b"\x1b[2K"), "the line is erased"


def test_explain_shows_stages_graph_bounds_and_memory(cli: Cli, spec: Path) -> None:
    """Every part of the answer has its lines, and every number its unit."""
    lines = dict(line.split(": ", 1) for line in cli("explain", spec).out.splitlines())
    stages = [f"stages.{name}" for name in ("load", "record", "plan", "capture", "check", "measure", "build")]
    assert [name for name in lines if name.startswith("stages.")] == stages
    assert all(lines[name].endswith("s") for name in stages)
    assert lines["graph.syncs"] == "0 needed for full concurrency, 0 used"
    assert (lines["graph.tasks"], lines["graph.width"], lines["graph.streams"]) == ("3", "1", "1")
    assert {"bounds.critical path", "bounds.all work", "bounds.replay", "memory.peak", "memory.arena"} <= set(lines)
    assert lines["schedule.answer"] == "miss: no schedule is stored under this key"
    found = cli("explain", spec).out.splitlines()
    assert found[1] == "schedule.answer: stored hit"
    assert found[2].startswith("schedule.first run: a job that finds no stored schedule continues in eager: ")


def test_explain_says_why_there_is_none(cli: Cli, spec: Path) -> None:
    """What is known is printed, and the exit code says that jobs will run in eager, as that of `cache build` does."""
    (spec.parent / "blocks.py").write_text(BLOCKS.replace("x.relu() + 1", "x * float(x.sum())"))
    failed = cli("explain", spec, "--json", "--quiet")
    assert (failed.code, failed.json["hit"], failed.lines) == (
        100,
        "miss",
        [f"nimble-jobs: jobs will run in eager: {failed.json['fallback']}"],
    )
    assert "schedule.fallback: no schedule could be built: " in cli("explain", spec).out
    undrawn = cli("explain", spec, "--dot", "a.dot", "--timeline", "a.svg")
    assert "schedule.fallback: no schedule could be built: " in undrawn.out
    assert (undrawn.code, "no schedule to draw" in undrawn.err) == (102, True)


def test_build_says_why_there_is_none(cli: Cli, spec: Path) -> None:
    """Where no schedule can be built the exit code says so, and each reason is named; the others are built."""
    (spec.parent / "blocks.py").write_text(BLOCKS.replace("x.relu() + 1", "x * float(x.sum())"))
    failed = cli("cache", "build", spec)
    assert (failed.code, "jobs will run in eager" in failed.err) == (100, True)


@pytest.mark.parametrize("sizes", ["0", "two", "1,,2", "-1", "1.5"])
def test_build_refuses_what_is_no_batch_size(cli: Cli, spec: Path, sizes: str) -> None:
    """Named with what was expected, before anything is built."""
    refused = cli("cache", "build", spec, f"--batch-size={sizes}")
    assert (refused.code, "expected whole numbers above 0" in refused.err) == (2, True)


def test_build_needs_permission_for_python(cli: Cli, spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's own code runs only from folders that were allowed."""
    monkeypatch.delenv("NIMBLE_JOBS_ALLOW_PYTHON")
    refused = cli("cache", "build", spec)
    assert (refused.code, "may not be run" in refused.err) == (2, True)
    assert cli("cache", "build", spec, "--allow-python", ".").code == 0


def test_why_names_what_differs(cli: Cli, spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing stored; a hit; another batch size; an edited module that the model imports. The model's code never runs:
    it may not.
    """
    empty = cli("cache", "why", spec, "--json").json
    assert (empty["hit"], empty["nearest"], empty["differences"]) == (False, None, [])
    cli("cache", "build", spec, "--batch-size", "2,5")
    monkeypatch.delenv("NIMBLE_JOBS_ALLOW_PYTHON")
    hit = cli("cache", "why", spec, "--json")
    assert (hit.code, hit.json["hit"], hit.json["nearest"]) == (0, True, None)
    other = cli("cache", "why", spec, "input.batch_size=3", "--json")
    assert (other.code, other.json["hit"]) == (0, False)
    (difference,) = other.json["differences"]
    assert (difference["part"], difference["wanted"]) == ("input", "x:float32[3, 4]")
    (spec.parent / "blocks.py").write_text(BLOCKS.replace("+ 1", "+ 2"))
    edited = cli("cache", "why", spec, "--json").json
    assert edited["changed_files"] == ["blocks.py"]
    assert [d["part"] for d in edited["differences"]] == ["model.file:blocks.py"]
    assert edited["nearest"]["input"] == "x:float32[2, 4]", "the one of the same shape is nearer"
    assert "schedule.changed: file blocks.py" in cli("cache", "why", spec).out
    assert edited["key_parts"]["model.source"] == "python:net.py:net"


def test_why_knows_that_it_was_set_aside(cli: Cli, spec: Path) -> None:
    """A quarantined schedule of this very key: the reason is told once, and it is not the nearest of itself."""
    (made,) = cli("cache", "build", spec, "--json").json
    store = cli.store()
    store.schedules.quarantine(made["key"], "in doubt", 0.0)
    store.close()
    answer = cli("cache", "why", spec, "--json").json
    assert (answer["hit"], answer["reason"]) == (False, "the stored schedule is quarantined: in doubt")
    assert (answer["nearest"], answer["differences"]) == (None, [])
    assert cli("cache", "why", spec).out.splitlines() == [
        f"schedule.key: {made['key'][:16]}",
        "schedule.answer: miss: the stored schedule is quarantined: in doubt",
    ]


def test_verify_replays(cli: Cli, spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replayed where the model's file is here and may run; else it is said plainly why not, and that is no failure."""
    # With oneDNN's kernels, which a search on busy cores may choose, a replay differs by its rounding.
    (made,) = cli("cache", "build", spec, "schedule.fuse=off", "--json").json
    (row,) = cli("cache", "verify", "--replay", "--json").json
    assert (row["replayed"], row["sound"], row["said"]) == (True, True, "equals eager")
    (listed,) = cli("cache", "ls", "--json").json
    assert (listed["hits"], cli("cache", "stats", "--json").json["uses"]["stored"]) == (0, 0), "to look is not to use"
    monkeypatch.delenv("NIMBLE_JOBS_ALLOW_PYTHON")
    answer = cli("cache", "verify", "--replay")
    assert (answer.code, "not replayed" in answer.out, "may not be run" in answer.out) == (0, True, True)
    (spec.parent / "blocks.py").write_text(BLOCKS.replace("+ 1", "+ 2"))
    assert "file blocks.py has changed" in cli("cache", "verify", "--replay", "--allow-python", ".").out
    monkeypatch.chdir(spec.parent / "home")
    assert "net.py, is not in " in cli("cache", "verify", made["key"], "--replay").out


def test_verify_quarantines_what_disagrees(cli: Cli, spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sound text whose replay does not agree with eager is as bad as a damaged one."""
    from nimble_jobs.engine import verify
    from nimble_jobs.errors import CheckFailed

    def disagree(*_a: object, **_k: object) -> float:
        raise CheckFailed("differs", error=0.5)

    cli("cache", "build", spec)
    monkeypatch.setattr(verify, "check", disagree)
    found = cli("cache", "verify", "--replay")
    assert (found.code, "quarantined" in found.out) == (100, True)
    assert [row["state"] for row in cli("cache", "ls", "--json").json] == ["quarantined"]


def test_export_and_import(cli: Cli, spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One file holds what was named; the other state folder then has a hit, and a second import changes nothing."""
    made = cli("cache", "build", spec, "--batch-size", "2,3", "--json").json
    keys = [each["key"][:10] for each in made]
    assert cli("cache", "export", *keys, "two.zip").code == 0
    assert cli("cache", "export", *keys, "two.zip").code == 2, "an existing file is not replaced"
    assert cli("cache", "export", "ef" * 32, "none.zip").code == 102
    other = Cli(spec.parent / "other", capsys)
    dry = other("cache", "import", "two.zip", "--dry-run")
    assert (dry.code, dry.err.splitlines()[-1]) == (0, "would import 2 schedules")
    assert other("cache", "ls", "--json").json == []
    taken = other("cache", "import", "two.zip", "--json").json
    assert [(each["key"], each["taken"]) for each in taken] == [(each["key"], True) for each in made]
    assert other("cache", "why", spec, "--json").json["hit"] is True
    assert other("run", spec, "--json").json["schedule"]["hit"] == "stored"
    again = other("cache", "import", "two.zip")
    assert (again.code, again.err.count("is stored here already, ready; left as it is")) == (0, 2)
    refused = other("cache", "import", spec)
    assert (refused.code, "expected a file that `cache export` wrote" in refused.err) == (2, True)
