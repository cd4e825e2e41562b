"""Help is quick, complete, and the page made of it is fresh."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from nimble_jobs import __version__
from nimble_jobs.cli import main
from tests.cli import Cli, loaded_by

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = ("prometheus_client", "pynvml", "opentelemetry")
HEAVY = ("torch", "sqlalchemy", "alembic", "pyarrow", "numpy", "pydantic", "rich", "networkx", *EXTRAS)


def test_help_loads_nothing_heavy() -> None:
    """`--help` imports no torch, database, array or terminal library."""
    code = (
        "import sys; from nimble_jobs.cli.main import main; code = main(['submit', '--help']);"
        f"heavy = [name for name in {HEAVY} if name in sys.modules]; print(heavy, file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")


def test_commands_load_no_extra(tmp_path: Path) -> None:
    """Only `metrics` loads Prometheus' client and the driver; only what sends traces loads OpenTelemetry."""
    commands = ["ls", "worker ls", "cron ls", "cache stats", "config show", "notifications ls"]
    assert loaded_by(commands, EXTRAS, tmp_path / "home") == [[command, 0, []] for command in commands]


@pytest.mark.parametrize("command", [[], ["submit"], ["cache", "ls"]])
def test_help_is_quick(command: list[str]) -> None:
    """`--help` takes under 0.3 s of CPU time, twice what it needs: the best of several tries, the first of which may
    have to compile the modules.

    The clock on the wall would measure what else the machine does; `scripts/bench_help.py` tells that time.
    """
    words = [sys.executable, "-m", "nimble_jobs.cli.main", *command, "--help"]
    assert min(_cpu_s(words) for _ in range(3)) < 0.3


def _cpu_s(command: list[str]) -> float:
    """CPU time of a process, in seconds."""
    before = os.times()
    subprocess.run(command, capture_output=True, check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


@pytest.mark.parametrize("args", [[], ["--help"], ["-h"]])
def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
    """Without a command the help comes, on stdout, with exit code 0."""
    from nimble_jobs.cli.main import main

    assert main(args) == 0
    out = capsys.readouterr().out
    for command in ("validate", "schema", "explain", "run", "submit", "ls", "show", "logs", "wait", "cancel", "doctor"):
        assert f"\n  {command} " in out


def test_lists_of_commands_end_their_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    """Each command in a list has its whole first sentence, on more than one line if it is long."""
    for path in [[], *([group] for group in ("worker", "cron", "cache", "seen", "config", "notifications", "bench"))]:
        assert main.main([*path, "--help"]) == 0
        listed = capsys.readouterr().out.partition("\nCommands:\n")[2]
        rows = re.split(r"\n  (?=\S)", listed.rstrip())
        assert len(rows) > 1
        assert [row for row in rows if not row.endswith(".") or row.endswith("...")] == []


def test_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` prints the version."""
    assert Cli(tmp_path, capsys)("--version").out == f"nimble-jobs {__version__}\n"


def _leaves(command: Any, *path: str) -> Iterator[str]:
    commands = getattr(command, "commands", None)
    if commands is None:
        yield " ".join(path)
    for name, each in (commands or {}).items():
        yield from _leaves(each, *path, name)


def test_the_readme_lists_every_command() -> None:
    """Each command is in its table, once, and nothing else is. After `cache ls` in a row, `show` is `cache show`."""
    commands = list(_leaves(typer.main.get_command(main.app)))
    table = (ROOT / "README.md").read_text().split("| command | what it does |\n|---|---|\n")[1].split("\n\n")[0]
    named = []
    for row in table.splitlines():
        group = ""
        for span in re.findall("`(.*?)`", row.split(" | ")[0]):
            words = " ".join(itertools.takewhile(re.compile("[a-z]+$").match, span.split()))
            named.append(f"{group} {words}" if f"{group} {words}" in commands else words)
            group = group or words.partition(" ")[0]
    assert sorted({*named}) == sorted(commands)
    assert [name for name in {*named} if named.count(name) > 1] == ["submit"]
