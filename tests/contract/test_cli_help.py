"""Help is quick, complete, and the page made of it is fresh."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nimble_jobs import __version__
from tests.cli import Cli

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


@pytest.mark.parametrize(
    "command",
    [["ls"], ["worker", "ls"], ["cron", "ls"], ["cache", "stats"], ["config", "show"], ["notifications", "ls"]],
)
def test_commands_load_no_extra(tmp_path: Path, command: list[str]) -> None:
    """Only `metrics` loads Prometheus' client and the driver; only what sends traces loads OpenTelemetry."""
    code = (
        f"import sys; from nimble_jobs.cli.main import main; code = main(['--home', {str(tmp_path)!r}, *{command}]);"
        f"extras = [name for name in {EXTRAS} if name in sys.modules]; print(extras, file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "[]")


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


def test_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` prints the version."""
    assert Cli(tmp_path, capsys)("--version").out == f"nimble-jobs {__version__}\n"
