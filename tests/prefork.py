"""Python processes of tests that need not import torch first: `subprocess` for commands that begin with this Python.

A process is forked from one that has imported torch and the package, and used neither (`prefork_server.py`): it has its
own process id, files, folder, environment and signals, and ends as any other. With `--all`, and wherever COLD is set,
it is started with `subprocess`. A process whose PYTHONPATH differs from that of the tests, or that is to show what it
imports, is always started so.

The test processes of pytest-xdist are forked likewise, from a process that has imported all test modules. xdist starts
them by `forked_python.py`, which also stands for Python in commands that a shell starts.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from tests import signals

COLD = "NIMBLE_JOBS_TESTS_COLD"
_SOCKET, _LIGHT_SOCKET = "NIMBLE_JOBS_TESTS_PREFORK", "NIMBLE_JOBS_TESTS_PREFORK_LIGHT"
_leftovers_expected = False


class Server:
    """The process that is forked from. It imports the package.

    With `collect`, arguments of pytest, it imports what collecting those tests does. If it is asked for `many`
    processes, it also imports what only some of them need. A `light` one imports torch alone.
    """

    def __init__(self, *collect: str, many: bool = False, light: bool = False) -> None:
        # The server removes it, also where this process is killed.
        self.path = str(Path(tempfile.mkdtemp(prefix=f"nimble-jobs-prefork-{os.getpid()}-")) / "socket")
        life, self._life = os.pipe()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(self.path)  # here, so that the first client need not wait until the server has started
        listener.listen(64)
        options = [] if collect else ["-W", "ignore"]  # pytest has filters of its own
        amount = "light" if light else "many" if many else "few"
        words = ["-m", "tests.prefork_server", str(listener.fileno()), str(life), amount, *collect]
        self._announced = _LIGHT_SOCKET if light else _SOCKET
        command = [sys.executable, *options, *words]
        single = {
            "JE_ARROW_MALLOC_CONF": "background_thread:false",
            "OPENBLAS_NUM_THREADS": "1",
        }  # no threads at import
        self._process = subprocess.Popen(
            command,
            cwd=Path(__file__).parents[1],
            stdin=subprocess.DEVNULL,
            pass_fds=[listener.fileno(), life],
            env=os.environ | single,
        )
        listener.close()
        os.close(life)

    def announce(self) -> None:
        """Let `start` or `run_light` find it, in this process and in test processes that are started from now on."""
        os.environ[self._announced] = self.path

    def close(self) -> None:
        """End it, and what tests that were interrupted have left of processes that were forked from it."""
        if os.environ.get(self._announced) == self.path:
            del os.environ[self._announced]
        os.close(self._life)
        self._process.wait()


class Process:
    """A forked process, used as a `subprocess.Popen` is."""

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        text: bool = False,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        server: str | None = None,
        tied: bool = False,
    ) -> None:
        """`tied`: the process is killed if this one is."""
        python, *words = map(str, command)
        assert python == sys.executable, "only processes of this Python can be forked"
        self.args = command
        self.returncode: int | None = None
        self.stdin: IO[Any] | None = None
        self.stdout: IO[Any] | None = None
        self.stderr: IO[Any] | None = None
        request = {
            "words": words,
            "folder": str(cwd or Path.cwd()),
            "environment": dict(os.environ if env is None else env),
            "ignored": signals.ignored(),
            "tied": tied,
        }
        with ExitStack() as theirs:
            files = []
            for number, given in enumerate((stdin, stdout, stderr)):
                if given == subprocess.PIPE:
                    ends = os.pipe()
                    mine, other = ends if number else ends[::-1]
                    mode = ("r" if number else "w") + ("" if text else "b")
                    setattr(self, ("stdin", "stdout", "stderr")[number], open(mine, mode))  # noqa: PTH123, SIM115
                    theirs.callback(os.close, other)
                elif given == subprocess.DEVNULL:
                    theirs.callback(os.close, other := os.open(os.devnull, os.O_RDWR))
                elif given == subprocess.STDOUT:
                    other = files[1]
                else:
                    other = number if given is None else given if isinstance(given, int) else given.fileno()
                files.append(other)
            self._link = _connected(server)
            socket.send_fds(self._link, [json.dumps(request).encode()], files)
        self.pid = self._number()
        mine_open = [self._link, *(f for f in (self.stdin, self.stdout, self.stderr) if f is not None)]
        weakref.finalize(self, _let_go, self.pid, mine_open)

    def poll(self) -> int | None:
        """Its exit code, the negative number of the signal that killed it, or None while it runs."""
        if self.returncode is None and select.select([self._link], [], [], 0)[0]:
            self._end()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code when it has ended. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._link], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self._end()
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[Any, Any]:
        """What it writes until it ends. Raises subprocess.TimeoutExpired."""
        said: dict[int, Any] = {}

        def read(number: int, file: IO[Any]) -> None:
            with file:
                said[number] = file.read()

        readers = [
            threading.Thread(target=read, args=(number, file), daemon=True)
            for number, file in enumerate((self.stdout, self.stderr))
            if file is not None
        ]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return said.get(0), said.get(1)

    def send_signal(self, number: int) -> None:
        """Nothing where it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        for file in (self.stdin, self.stdout, self.stderr):
            if file is not None:
                file.close()
        self.wait()

    def _number(self) -> int:
        packet = self._link.recv(32)
        if not packet:
            raise RuntimeError("the process that is forked from has ended; its stderr says why")
        return int(packet)

    def _end(self) -> None:
        self.returncode = os.waitstatus_to_exitcode(self._number())
        self._link.close()


def start(command: Sequence[str | Path], **named: Any) -> Any:
    """The process of a command that begins with `sys.executable`: a Process, or a subprocess.Popen where it is cold.

    Takes stdin, stdout, stderr, text, cwd and env as `subprocess.Popen` does.
    """
    return subprocess.Popen(command, **named) if os.environ.get(COLD) else Process(command, **named)


def run(
    command: Sequence[str | Path],
    *,
    timeout: float | None = None,
    capture_output: bool = False,
    check: bool = False,
    **named: Any,
) -> subprocess.CompletedProcess[Any]:
    """As `subprocess.run`, for a command that begins with `sys.executable`."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} if capture_output else {}
    with start(command, **pipes, **named) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def run_light(code: str, *words: str, check: bool = True, **named: Any) -> subprocess.CompletedProcess[Any]:
    """Run Python code with arguments in a process that has imported torch alone, and catch what it prints."""
    command = [sys.executable, "-c", code, *words]
    named |= {"capture_output": True, "text": True}
    if os.environ.get(COLD):
        return subprocess.run(command, check=check, **named)
    return run(command, check=check, server=os.environ[_LIGHT_SOCKET], **named)


def words(server: str | None = None) -> list[str]:
    """Words that stand for `sys.executable` in a command that is started elsewhere: by a shell, or by xdist.

    The process ends when it is asked to with SIGTERM, and is killed with SIGKILL.
    """
    if server is None and os.environ.get(COLD):
        return [sys.executable]
    return [sys.executable, str(Path(__file__).with_name("forked_python.py")), server or os.environ[_SOCKET]]


def expect_leftovers() -> None:
    """From now on, close without a word what is left of processes: a test that fails need not have ended its own."""
    global _leftovers_expected
    _leftovers_expected = True


def _let_go(pid: int, files: list[Any]) -> None:
    """Close what a process that is forgotten had open; a test that passes must not leave one."""
    left = [file for file in files if (file.fileno() >= 0 if isinstance(file, socket.socket) else not file.closed)]
    for file in left:
        with suppress(OSError):  # a pipe whose other end is gone
            file.close()
    if left and not _leftovers_expected:
        warnings.warn(f"nobody waited for the forked process {pid}, or closed its pipes", ResourceWarning, stacklevel=1)


def _connected(server: str | None) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.connect(server or os.environ[_SOCKET])
    return link
