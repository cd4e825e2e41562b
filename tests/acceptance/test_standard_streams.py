"""Commands whose standard streams are closed, broken or on a full disk: no traceback, and an exit code that tells."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nimble_jobs.store import open_store
from nimble_jobs.store.home import resolve
from tests import prefork
from tests.store_samples import queued

COMMANDS = ["ls --json", "show {id}", "--help", "schema", "doctor --no-device"]
STARTED_COLD = ("ls --json", "--help")  # one that prints by itself, and one by Typer
LONG = "x" * 1_000_000  # much more than a pipe and its reader hold


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve(str(tmp_path_factory.mktemp("state") / "home"))


@pytest.fixture(scope="module")
def job_id(home: Path) -> str:
    with open_store(home) as store:
        return queued(store, spec={"long": LONG}, name="n", kind="score", now=time.time()).id


def shell(line: str, home: Path, *, buffered: bool = True, cold: bool = True) -> subprocess.CompletedProcess[str]:
    """A line of bash; NJ in it is the command. Where it is not `cold` it may be forked, which needs open streams."""
    python = [sys.executable] if cold else prefork.words()
    script = f'NJ() {{ {shlex.join(python)} -m nimble_jobs.cli.main "$@"; }}\n{line}'
    environment = os.environ | {"NIMBLE_JOBS_HOME": str(home), "PYTHONUNBUFFERED": "" if buffered else "1"}
    return subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=False, env=environment, timeout=120
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_a_reader_that_leaves(command: str, home: Path, job_id: str) -> None:
    """Silent; 141 where something was left to say."""
    line = f"NJ {command.format(id=job_id)} | true; exit ${{PIPESTATUS[0]}}"
    answer = shell(line, home, cold=command in STARTED_COLD)
    assert answer.stderr == ""
    assert answer.returncode in (0, 141)


def test_a_reader_that_has_seen_enough(home: Path, job_id: str) -> None:
    """What is longer than a pipe cannot be written to its end: 141, like any program that SIGPIPE ends."""
    answer = shell(f"NJ show {job_id} --json | head -1; exit ${{PIPESTATUS[0]}}", home)
    assert (answer.stdout, answer.stderr, answer.returncode) == ("{\n", "", 141)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_closed_stdout(command: str, home: Path, job_id: str) -> None:
    """Silent, with the exit code of the command."""
    answer = shell(f"NJ {command.format(id=job_id)} >&-", home)
    assert (answer.stdout, answer.stderr, answer.returncode) == ("", "", 0)


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_stdout(command: str, buffered: bool, home: Path, job_id: str) -> None:
    """One line that says so, whether Python meets it at once or when it writes out what it holds."""
    answer = shell(f"NJ {command.format(id=job_id)} >/dev/full", home, buffered=buffered, cold=command in STARTED_COLD)
    assert answer.stderr == "nimble-jobs: standard output cannot be written: No space left on device\n"
    assert answer.returncode == 1


@pytest.mark.parametrize("how", ["2>&-", "2>/dev/full", ">&- 2>&-", ">/dev/full 2>/dev/full", "<&- >&- 2>&-"])
def test_a_closed_or_full_stderr(how: str, home: Path) -> None:
    """The exit code still tells; nothing else can."""
    closed = "&-" in how
    assert shell(f"NJ show nosuchjob {how}", home, cold=closed).returncode == 102
    assert shell(f"NJ nosuchcommand {how}", home, cold=closed).returncode == 2


def test_what_a_closed_stream_leaves_is_no_file_of_ours(home: Path, job_id: str) -> None:
    """The database does not become standard output, to which libraries print."""
    code = (
        "import os, sys; from nimble_jobs.cli import streams; streams.present(); "
        "sys.stderr.write(os.readlink('/proc/self/fd/1'))"
    )
    answer = subprocess.run(
        ["bash", "-c", f'{sys.executable} -c "{code}" >&-'], capture_output=True, text=True, check=False
    )
    assert answer.stderr == "/dev/null"
    with open_store(home) as store:
        assert store.check() == []
        assert store.jobs.get(job_id).id == job_id
