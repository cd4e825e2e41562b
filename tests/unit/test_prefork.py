"""Processes forked for tests are as those that are started cold."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import prefork
from tests.waiting import PATIENCE_S

TELL = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "first": sys.path[0], "folder": os.getcwd(), "name": __name__, "word": os.environ.get("WORD"),
    "home": os.environ.get("HOME"), "session": os.getsid(0), "group": os.getpgid(0), "in": sys.stdin.read(),
    "encoding": sys.stdout.encoding, "buffered": sys.stdout.line_buffering,
    "files": sorted(os.path.basename(os.readlink(f"/proc/self/fd/{n}")).split(":")[0] for n in (0, 1, 2)),
}))
print("to stderr", file=sys.stderr)
sys.exit(7)
"""
FORKED = pytest.mark.skipif(bool(os.environ.get(prefork.COLD)), reason="every process is started cold")


@pytest.mark.parametrize("how", ["code", "module", "file"])
def test_a_process_finds_what_it_would_find(how: str, tmp_path: Path) -> None:
    """Words, folder, import path, environment, standard files, session, output and exit code are the same."""
    (tmp_path / "told.py").write_text(TELL)
    words = {"code": ["-c", TELL], "module": ["-m", "told"], "file": [str(tmp_path / "told.py")]}[how]
    (tmp_path / "in").write_text("typed")
    answers = []
    for run in (subprocess.run, prefork.run):
        with (tmp_path / "in").open() as given:
            done = run(
                [sys.executable, *words, "one", "two words"],
                stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
                env={"WORD": "wörd", "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
            )  # fmt: skip
        answers.append((done.returncode, done.stdout, done.stderr))
    assert answers[0] == answers[1]
    assert answers[0][0] == 7
    assert "w\\u00f6rd" in answers[0][1]


@FORKED
@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
@pytest.mark.parametrize("believed", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_process_ignores_the_signals_that_its_parent_ignores(
    handler: signal.Handlers, believed: signal.Handlers
) -> None:
    """A shell's background job, as CI's may be, begins with some ignored: those of the server need not be the same.
    A library may change that behind Python.
    """
    number = signal.SIGQUIT
    code = f"import signal; print(signal.getsignal({number:d}))"
    before, answers = signal.signal(number, believed), []
    try:
        ctypes.CDLL(None).signal(ctypes.c_int(number), ctypes.c_void_p(int(handler)))
        for run in (subprocess.run, prefork.run):
            answers.append(run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True).stdout)
    finally:
        signal.signal(number, before)
    assert answers[0] == answers[1] != ""


@pytest.mark.parametrize(
    ("code", "exit_code", "last"),
    [
        ("pass", 0, ""),
        ("raise SystemExit('gone')", 1, "gone"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        # a shell's background jobs begin with SIGINT ignored
        (
            "import os, signal; signal.signal(2, signal.default_int_handler); os.kill(os.getpid(), 2)",
            -2,
            "KeyboardInterrupt",
        ),
        ("import atexit; atexit.register(lambda: print('left', file=__import__('sys').stderr))", 0, "left"),
    ],
)
def test_an_end_is_told(code: str, exit_code: int, last: str) -> None:
    """Exit codes, signals, tracebacks, and what is to be done at the exit."""
    for run in (subprocess.run, prefork.run):
        done = run([sys.executable, "-c", code], capture_output=True, text=True)
        assert (done.returncode, (done.stderr.splitlines() or [""])[-1]) == (exit_code, last), run


@FORKED
@pytest.mark.parametrize("threads", [1, 2])
def test_a_forked_process_has_torch_and_one_thread(threads: int) -> None:
    """It need not import torch; nobody has used it: no thread runs, it takes as many as it is told, and computes."""
    code = (
        "import sys, os; print('torch' in sys.modules, len(os.listdir('/proc/self/task')), end=' ');"
        "import torch; a = torch.ones(300, 300); print((a @ a).sum().item(), torch.get_num_threads())"
    )
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = prefork.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    # Told to take two, torch starts the second one at once.
    assert (done.returncode, done.stdout, done.stderr) == (0, f"True {threads} 27000000.0 {threads}\n", "")


def test_a_process_obeys_its_variables() -> None:
    """Also one that a module reads as it is imported."""
    code = (
        "from nimble_jobs.store import leases, workers;"
        "print(leases.LEASE_S, workers.Leases.begin.__globals__['LEASE_S'])"
    )
    environment = os.environ | {"NIMBLE_JOBS_LEASE_S": "24"}
    done = prefork.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "24.0 24.0\n", "")


def test_processes_draw_different_random_numbers() -> None:
    """Two of them, by Python and by numpy."""
    code = "import random, numpy; print(random.random(), numpy.random.rand())"
    assert len({prefork.run([sys.executable, "-c", code], capture_output=True).stdout for _ in range(3)}) == 3


@FORKED
def test_a_process_is_killed_with_what_stands_for_it() -> None:
    """As a shell kills the command that it has started."""
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with subprocess.Popen([*prefork.words(), "-c", code], stdout=subprocess.PIPE, text=True) as process:
        pid = int(process.stdout.readline())
        process.kill()
        assert process.stdout.read() == ""  # it has ended
    assert pid != process.pid


def test_a_process_can_be_watched_and_killed() -> None:
    """`poll`, `wait` with a time limit, signals to its number; its place is empty when it has ended."""
    process = prefork.start(
        [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"], stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout.readline() == b"up\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.01)
        process.terminate()
        assert process.wait(timeout=PATIENCE_S) == -signal.SIGTERM
        process.kill()  # nothing any more
    assert not Path(f"/proc/{process.pid}").exists()


@FORKED
def test_a_process_lets_go_of_what_is_not_its_own(tmp_path: Path) -> None:
    """A pipe is at its end when the one process that wrote to it has ended, though others were forked meanwhile."""
    first = prefork.start(
        [sys.executable, "-c", "input(); print('one')"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    second = prefork.start([sys.executable, "-c", "import time; time.sleep(600)"])
    first.stdin.write("\n")
    first.stdin.close()
    assert first.stdout.read() == "one\n"
    assert first.wait() == 0
    assert second.poll() is None
    second.kill()
    second.wait()
    first.stdout.close()


@FORKED
def test_another_import_path_is_refused() -> None:
    """What was imported already would be the tests' own."""
    done = prefork.run(
        [sys.executable, "-c", "pass"], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": "/x"}
    )
    assert done.returncode == 1
    assert "has to be started with subprocess" in done.stderr


FORKED_TESTS = """
import os, sys
from pathlib import Path

print("imported by", os.getpid())
Path(__file__).with_name(f"import-{os.getpid()}").touch()

def test_a(): assert "tests.prefork_server" in Path("/proc/self/cmdline").read_text()
def test_b(): os._exit(3)
def test_c(): Path("typed").touch(); assert Path("typed").exists()
def test_d(tmp_path): assert "popen-gw" in str(tmp_path)
def test_e(): assert 1 + 1 == 3
"""


@FORKED
def test_test_processes_are_forked_from_one_that_has_collected(tmp_path: Path) -> None:
    """xdist's processes find the test modules imported; one that dies is replaced, and asserts are explained."""
    (tmp_path / "test_of_them.py").write_text(FORKED_TESTS)
    (tmp_path / "conftest.py").write_text("from tests.conftest import *")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", "test_of_them.py"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    said = done.stdout + done.stderr
    assert "2 failed, 3 passed" in said, said
    assert "crashed while running 'test_of_them.py::test_b'" in said, said
    assert "assert (1 + 1) == 3" in said, said
    assert len(list(tmp_path.glob("import-*"))) == 1, said
