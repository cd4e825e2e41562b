"""Starts Python processes that have torch: `python -m tests.prefork_server LISTENER LIFE AMOUNT [PYTEST ARGUMENT...]`.

It imports torch and the package when the first process is asked for, and uses neither: there is one thread, no tensor
and no open file of the package when it forks. With arguments of pytest it collects those tests instead, for which
their modules are imported, and runs none. For many tests, or where AMOUNT is `many`, it also imports what only some
processes need. Where AMOUNT is `light`, it imports torch alone.

LISTENER is the file descriptor of a socket that listens; LIFE is that of a pipe, and the server ends when it is closed.

A client connects, sends one packet (JSON, with its stdin, stdout and stderr) and reads two: the process id now, and the
wait status when the process has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import pkgutil
import random
import runpy
import selectors
import shutil
import signal
import socket
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

from tests import signals, zygote

_STARTED_WITH = os.environ.get("PYTHONPATH", "")
_LEFT_OUT = ("__main__", "depthwise_triton", "migrations.env", "ray.driver")  # they run, or need a GPU or Ray
# What tests and commands import while they run: with many, each of their processes would import it.
_LATE = (
    "filelock",
    "matplotlib.pyplot",
    "numpy.ma",
    "opentelemetry.sdk.trace",
    "psycopg",
    "pydantic.type_adapter",
    "s3fs",
    "sklearn.datasets",
    "torch._inductor.compile_fx",
    "transformers.models.bert.modeling_bert",
    "typer._adapters",
    "uvicorn",
)
_MANY = 1000
MANY, LIGHT = "many", "light"  # arguments
# Words of processes that may start others with torch: workers, what waits for one, their children, and those of xdist.
_PARENTS = ("worker", "--wait", zygote.SPAWNED, "exec(eval(")
_LEASE_S = "NIMBLE_JOBS_LEASE_S"  # read by a module as it is imported


def main() -> None:
    """Serve; and in a process that was forked, become what was asked for."""
    ending = _Ending()
    atexit.register(ending.leave)  # the first that is registered is the last that is called
    listener = socket.socket(fileno=int(sys.argv[1]))
    address = listener.getsockname()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; only the tests' own process decides
    if request := _serve(listener, int(sys.argv[2]), sys.argv[4:], amount=sys.argv[3]):
        with ending:
            _become(*request)
    else:
        shutil.rmtree(Path(address).parent, ignore_errors=True)


class _Ending:
    """How a forked process ends: as any other, but without a cleanup of what it shares with its server."""

    def __init__(self) -> None:
        self._code: int | None = None  # None: in Python's own way

    def __enter__(self) -> None:
        pass

    def __exit__(self, _type: Any, error: BaseException | None, _at: Any) -> None:
        """What was raised goes on, and is printed by Python."""
        if error is None:
            self._code = 0
        elif isinstance(error, SystemExit):
            if error.code is None or isinstance(error.code, int):
                self._code = (error.code or 0) & 0xFF
            else:
                self._code = 1
        elif isinstance(error, Exception):
            self._code = 1

    def leave(self) -> None:
        """The last of all functions that were to be called at the exit."""
        if self._code is None:
            return
        with contextlib.suppress(Exception):  # Python then says so, and ends with a code of its own
            for stream in (sys.stdout, sys.stderr):
                if stream is not None and not stream.closed:
                    stream.flush()
            os._exit(self._code)


class _Served:
    """The processes that were forked, each with the client that asked for it."""

    def __init__(self, waiting: selectors.BaseSelector) -> None:
        self._waiting = waiting
        self._clients: dict[int, tuple[int, socket.socket]] = {}  # by pidfd
        self._tied: dict[socket.socket, int] = {}  # process ids

    def add(self, pid: int, client: socket.socket, *, tied: bool) -> None:
        self._clients[pidfd := os.pidfd_open(pid)] = pid, client
        self._waiting.register(pidfd, selectors.EVENT_READ)
        if tied:
            self._tied[client] = pid
            self._waiting.register(client, selectors.EVENT_READ)

    def heed(self, key: selectors.SelectorKey) -> None:
        """A process has ended, or a client to which one is tied was killed."""
        if isinstance(key.fileobj, socket.socket):
            if pid := self._tied.pop(key.fileobj, None):
                self._waiting.unregister(key.fileobj)
                os.kill(pid, signal.SIGKILL)
            return
        pid, client = self._clients.pop(key.fd)
        self._waiting.unregister(key.fd)
        os.close(key.fd)
        _, status = os.waitpid(pid, 0)
        _say(client, status)
        if self._tied.pop(client, None):
            self._waiting.unregister(client)
        client.close()

    def kill(self) -> None:
        for pid, _ in self._clients.values():
            os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        for pidfd, (_, client) in self._clients.items():
            client.close()
            os.close(pidfd)


def _serve(
    listener: socket.socket, life: int, collect: list[str], *, amount: str
) -> tuple[dict[str, Any], list[int]] | None:
    """None when nobody needs it any more; in a new process, what this is to be and its standard files."""
    waiting = selectors.DefaultSelector()
    waiting.register(listener, selectors.EVENT_READ)
    waiting.register(life, selectors.EVENT_READ)
    served = _Served(waiting)
    ready = False
    while True:
        for key, _ in waiting.select():
            if key.fd == life:
                if not collect:  # a test that was interrupted has left them
                    served.kill()
                return None
            if key.fileobj is not listener:
                served.heed(key)
                continue
            client, _ = listener.accept()
            packet, files, _, _ = socket.recv_fds(client, 1 << 18, 3)
            if not ready:
                _preload(collect, amount)
                ready = True
            request = json.loads(packet)
            pid = os.fork()
            if pid == 0:
                served.close()
                for open_one in (listener, client, waiting):
                    open_one.close()
                os.close(life)
                return request, list(files)
            for fd in files:
                os.close(fd)
            _say(client, pid)
            served.add(pid, client, tied=request["tied"])


def _say(client: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # a test that is over does not listen
        client.send(str(number).encode())


def _preload(collect: list[str], amount: str) -> None:
    """Import what processes of tests need, or what the test processes themselves do.

    Hardly anything that imports make is ever garbage, and to look for it takes a fifth of the time where Python has yet
    to compile the modules.
    """
    gc.disable()
    many = amount == MANY
    if amount == LIGHT:
        importlib.import_module("torch")
    elif collect:
        import pytest

        options, counted = ["--collect-only", "-qq", "-p", "no:xdist", "-p", "no:cacheprovider"], _Counted()
        with contextlib.redirect_stdout(io.StringIO()):  # a test process meets the same errors, and tells them
            pytest.main([*options, *collect], plugins=[counted])
        many = counted.tests >= _MANY
    else:
        import nimble_jobs

        for module in pkgutil.walk_packages(nimble_jobs.__path__, "nimble_jobs."):
            if not module.name.endswith(_LEFT_OUT) and not module.name.startswith("nimble_jobs.bench"):
                importlib.import_module(module.name)
    for name in _LATE if many else ():
        with warnings.catch_warnings(action="ignore"), contextlib.suppress(ImportError):  # tests skip without it
            importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208  # names, no paths
    if threads != 1:
        raise RuntimeError(f"the imports started {threads - 1} threads; a process forked now could hang")
    gc.collect()
    gc.freeze()  # no collection of a forked process looks at, and so copies, what was imported here
    gc.enable()


class _Counted:
    """A plugin that knows how many tests were collected."""

    tests = 0

    def pytest_collection_finish(self, session: Any) -> None:
        self.tests = len(session.items)


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Be what `python WORDS` would be, with these standard files, this folder and this environment."""
    words, environment = request["words"], request["environment"]
    for number, file in enumerate(files):
        os.dup2(file, number)
        if file > 2:
            os.close(file)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115  # as Python opens them
    sys.stdout = sys.__stdout__ = _writer(1, environment, "strict")
    sys.stderr = sys.__stderr__ = _writer(2, environment, "backslashreplace", line_buffering=True)
    if environment.get("PYTHONPATH", "") != _STARTED_WITH:
        raise RuntimeError("a process with another PYTHONPATH has to be started with subprocess")
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(environment)
    signals.ignore(request["ignored"])
    if signal.SIGINT not in request["ignored"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _set_apart(environment)

    if any(sign in word for word in words for sign in _PARENTS) and (spawned := zygote.keep()):
        _become(*spawned)
        return
    if safe_path := words[0] == "-P":
        del words[0]
    how, *arguments = words
    if how in ("-m", "-c"):
        first, sys.argv = str(Path.cwd()) if how == "-m" else "", [how, *arguments[1:]]
    else:
        first, sys.argv = str(Path(how).parent.resolve()), words
    sys.path[:1] = [] if safe_path else [first]
    if how == "-m":
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        sys.modules["__main__"] = module = ModuleType("__main__")
        exec(compile(arguments[0], "<string>", "exec"), module.__dict__)
    else:
        runpy.run_path(how, run_name="__main__")


def _writer(number: int, environment: dict[str, str], errors: str, *, line_buffering: bool = False) -> io.TextIOWrapper:
    raw = io.FileIO(number, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding="utf-8",
        errors=errors,
        line_buffering=line_buffering or raw.isatty(),
        write_through=bool(environment.get("PYTHONUNBUFFERED")),
    )


def _set_apart(environment: dict[str, str]) -> None:
    """Give this process what a new one reads as its libraries load."""
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) and (threads := environment.get("OMP_NUM_THREADS")):
        torch.set_num_threads(int(threads))
    if _LEASE_S in environment:
        importlib.reload(importlib.import_module("nimble_jobs.store.leases"))


if __name__ == "__main__":
    main()
