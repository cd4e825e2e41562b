"""A zygote: the process from which a worker of the tests has its children forked, so that none has to import torch.

A worker starts its children with multiprocessing's `spawn`. One that was forked for a test (`prefork_server.py`) keeps
a zygote: a fork of itself, made before it did anything. `spawn` then has its command run in a fork of the zygote. This
is a child of the worker like any other, with a process id, group, environment, signals, limits and open files as
`spawn` gives them: the zygote forks it through a process that ends at once, and the kernel hands orphans to the worker
while this is its subreaper.

A command that starts a worker, with `os.posix_spawn`, keeps one too, and has the worker forked from it. So do a
worker's children and the processes that run tests: with `subprocess`, a training in them starts the processes of its
other ranks, and a measurement those that measure.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing import util
from pathlib import Path
from typing import Any

import psutil

from tests import signals

SPAWNED = "spawn_main"  # a word in the command of a process that `spawn` starts, or the name of one that was forked
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
FOLLOWER = "follower"  # the name of a process of another rank that was forked
_WORKER = [sys.executable, "-P", "-m", "nimble_jobs.worker"]  # how the command of a worker begins
# The modules of processes that `subprocess` starts, with the names of those that were forked.
_MODULES = {
    "nimble_jobs.workloads.training.follower": FOLLOWER,
    "tests.failing_rank": FOLLOWER,
    "nimble_jobs.bench": "bench",
}
_HIGH = 512  # file descriptors from here on are not in use
_LIMITS = [value for name, value in vars(resource).items() if name.startswith("RLIMIT_")]


def spawned(pid: int) -> list[psutil.Process]:
    """The living children of a process that `spawn` has started; multiprocessing's resource tracker is none of them."""
    listed = Path(f"/proc/{pid}/task/{pid}/children")  # where there is no such file a search finds them, but slowly
    numbers = listed.read_text().split() if listed.exists() else [c.pid for c in psutil.Process(pid).children()]
    found = []
    for number in numbers:
        with suppress(psutil.NoSuchProcess):  # it has just ended
            child = psutil.Process(int(number))
            if child.status() != psutil.STATUS_ZOMBIE and SPAWNED in " ".join([child.name(), *child.cmdline()]):
                found.append(child)
    return found


def keep() -> tuple[dict[str, Any], list[int]] | None:
    """From now on have this process's children forked. In each child, what it is to be and its standard files.

    Call it while there is one thread and nothing is open but the standard files.
    """
    mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork() == 0:
        mine.close()
        return _serve(other, parent)
    other.close()
    python_path, asking = os.environ.get("PYTHONPATH"), threading.Lock()
    cold, cold_spawn, cold_exec = util.spawnv_passfds, os.posix_spawn, subprocess._fork_exec  # type: ignore[attr-defined]

    def fork(standard: Sequence[int], files: Sequence[int] = (), **given: Any) -> int:
        request = {
            "folder": str(Path.cwd()),
            "files": files,
            "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
            "ignored": signals.ignored(),
            **given,
        }
        with asking:
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(mine, [json.dumps(request).encode()], [*standard, *files])
                return int(mine.recv(32))
            finally:
                _prctl(_PR_SET_CHILD_SUBREAPER, 0)

    def start(path: bytes, words: Sequence[str | bytes], files: Sequence[int]) -> int:
        command = [os.fsdecode(word) for word in words]
        if SPAWNED not in " ".join(command) or os.environ.get("PYTHONPATH") != python_path:
            return cold(path, words, files)
        inherited = sorted({int(file) for file in files})
        how = command[command.index("-c") :]
        return fork((0, 1, 2), inherited, words=how, environment=dict(os.environ), name=SPAWNED)

    def spawn(
        path: str,
        words: Sequence[str],
        environment: Mapping[str, str],
        *,
        file_actions: Sequence[Any] = (),
        **more: Any,
    ) -> int:
        if [*words[: len(_WORKER)]] != _WORKER or environment.get("PYTHONPATH") != python_path:
            return cold_spawn(path, words, environment, file_actions=file_actions, **more)
        with ExitStack() as opened:
            standard = [0, 1, 2]
            for what, *how in file_actions:
                if what == os.POSIX_SPAWN_OPEN:
                    number, name, flags, mode = how
                    opened.callback(os.close, file := os.open(name, flags, mode))
                else:
                    assert what == os.POSIX_SPAWN_DUP2
                    file, number = how
                standard[number] = file
            return fork(standard, words=list(words[1:]), environment=dict(environment), setsid=more["setsid"])

    def execute(words: Sequence[str | bytes], *given: Any) -> int:
        command = [os.fsdecode(word) for word in words]
        name = _MODULES.get(command[2]) if command[:2] == [sys.executable, "-m"] else None
        if name is None or os.environ.get("PYTHONPATH") != python_path:
            return int(cold_exec(words, *given))
        numbers = (2, 3, 4, 5, 8, 10, 12, 14)
        kept, folder, environment, stdin, stdout, stderr, fails, setsid = (given[at] for at in numbers)
        assert folder is None
        assert environment is None
        standard = [file if file >= 0 else number for number, file in enumerate((stdin, stdout, stderr))]
        inherited = [file for file in kept if file != fails]
        how = {"words": command[1:], "environment": dict(os.environ), "name": name, "setsid": setsid}
        return fork(standard, inherited, **how)

    subprocess._fork_exec = execute  # type: ignore[attr-defined]
    util.spawnv_passfds = start  # type: ignore[attr-defined]  # the stubs do not have it
    os.posix_spawn = spawn
    return None


def _serve(link: socket.socket, parent: int) -> tuple[dict[str, Any], list[int]]:
    """Be the zygote until the parent is gone. Returns in each new process."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # those of a terminal are meant for the parent
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):  # whoever reads what the parent writes does not wait for this process
        os.dup2(nothing, number)
    os.close(nothing)
    while os.getppid() == parent:
        packet, files, _, _ = socket.recv_fds(link, 1 << 18, 32)
        if not packet:
            break
        if (pid := os.fork()) == 0:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == between:
                os.sched_yield()
            if os.getppid() != parent:  # it has just ended
                os._exit(1)
            link.send(str(os.getpid()).encode())
            link.close()
            return _as_spawned(json.loads(packet), files)
        os.waitpid(pid, 0)
        for fd in files:
            os.close(fd)
    os._exit(0)


def _as_spawned(request: dict[str, Any], files: list[int]) -> tuple[dict[str, Any], list[int]]:
    """Have name, open files, signals and limits as after a start of Python by the parent."""
    if name := request.get("name"):
        _prctl(_PR_SET_NAME, name.encode())
    if request.get("setsid"):
        os.setsid()
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGH) for fd in files]
    for fd in files:
        os.close(fd)
    for number, fd in zip(request["files"], high[3:], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    signals.ignore(request["ignored"])
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    for limit in _LIMITS:
        resource.setrlimit(limit, resource.prlimit(os.getppid(), limit))
    return request, high[:3]


def _prctl(option: int, value: int | bytes) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
