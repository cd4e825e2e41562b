"""Locks of the state folder: they end with their holder, and nothing weaker takes their place."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nimble_jobs.errors import StoreError, StoreGone
from nimble_jobs.patience import Lent, Patience
from nimble_jobs.store.locks import EXCLUSIVE, Lock, exclusive
from tests import prefork

SOON_S = 60.0  # what frees a lock may need a moment on a busy machine


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a lock file, in a folder of its own."""
    (tmp_path / "builds").mkdir()
    return tmp_path / "builds" / "x.lock"


def is_free(path: Path) -> bool:
    with exclusive(path, poll_s=0.01, limit_s=0.0) as mine:
        return mine


def test_a_turn_is_for_one_thread(path: Path) -> None:
    """Neither another thread of the process nor the same thread gets a lock that is held; the holder keeps it."""
    with exclusive(path, poll_s=0.01) as mine:
        assert mine
        answers: list[bool] = []
        thread = threading.Thread(target=lambda: answers.append(is_free(path)))
        thread.start()
        thread.join()
        assert answers == [False]
        assert not is_free(path)
        assert not is_free(path)
    assert is_free(path)


def test_a_waiter_is_asked_until_it_has_its_turn(path: Path) -> None:
    """It hears how long it has waited, and takes the lock once the holder lets go."""
    go, waits = threading.Event(), []

    def hold(held: threading.Event) -> None:
        with exclusive(path, poll_s=0.01):
            held.set()
            go.wait(SOON_S)

    held = threading.Event()
    thread = threading.Thread(target=hold, args=(held,))
    thread.start()
    assert held.wait(SOON_S)

    def waiting(waited_s: float) -> None:
        waits.append(waited_s)
        if len(waits) == 3:
            go.set()

    with exclusive(path, poll_s=0.01, limit_s=SOON_S, waiting=waiting) as mine:
        assert mine
    thread.join()
    assert waits == sorted(waits)
    assert len(waits) >= 3


_HOLD = """
import os, subprocess, sys, time
from pathlib import Path
from nimble_jobs.store.locks import exclusive
with exclusive(Path(sys.argv[1]), poll_s=0.01):
    if sys.argv[2] == "fork":
        child = os.fork() or time.sleep(600)
    elif sys.argv[2] == "exec":
        child = subprocess.Popen(["sleep", "600"], close_fds=False).pid
    else:
        child = 0
    print(child, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("heir", ["none", "fork", "exec"])
def test_a_killed_holder_lets_go(path: Path, heir: str) -> None:
    """Also where a process that it started lives on."""
    command = [sys.executable, "-c", _HOLD, str(path), heir]
    with prefork.start(command, stdout=prefork.subprocess.PIPE, text=True) as holder:
        child = int(holder.stdout.readline())
        try:
            assert not is_free(path)
            holder.kill()
            holder.wait()
            with exclusive(path, poll_s=0.01, limit_s=SOON_S) as mine:
                assert mine
            if child:
                os.kill(child, 0)  # it is there still
        finally:
            if child:
                os.kill(child, 9)


def test_files_stay_and_are_private(path: Path) -> None:
    """A lock file is left in place, mode 0600 whatever the umask; what it says is not touched."""
    before = os.umask(0)
    try:
        with exclusive(path, poll_s=0.01):
            path.write_text("said")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    inode = path.stat().st_ino
    assert is_free(path)
    assert (path.stat().st_ino, path.read_text()) == (inode, "said")


@pytest.mark.parametrize("lose", ["file", "folder"])
def test_a_lock_is_of_the_file_that_has_the_path(path: Path, lose: str) -> None:
    """Whoever comes after a lock file or its folder was replaced locks the new one, as all others do from then on."""

    def replace(_waited_s: float) -> None:
        if lose == "file":
            path.unlink()
        else:
            path.parent.rename(path.parent.with_name("old"))
            path.parent.mkdir()

    with exclusive(path, poll_s=0.01), exclusive(path, poll_s=0.01, limit_s=SOON_S, waiting=replace) as mine:
        assert mine
        assert path.exists()
        assert not is_free(path)


def test_a_missing_folder_is_not_made(path: Path) -> None:
    """A state folder that was taken away does not come back empty."""
    path.parent.rmdir()
    with pytest.raises(StoreGone, match="put it back"), exclusive(path, poll_s=0.01):
        raise AssertionError
    assert not path.parent.exists()


def _turn(path: Path) -> None:
    with exclusive(path, poll_s=0.01):
        raise AssertionError


def _lock(path: Path) -> None:
    with Lock(path) as lock:
        lock.take(EXCLUSIVE)
        raise AssertionError


@pytest.mark.parametrize("take", [_turn, _lock])
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_no_soft_locks(path: Path, take: Callable[[Path], None], number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without `flock`, as some network file systems, is an error that says so, and leaves no marker."""

    def flock(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(StoreError, match=r"has no file locks \(.*\); choose another with --home"):
        take(path)
    monkeypatch.undo()
    assert is_free(path)
    assert path.read_bytes() == b""


def test_what_is_no_lock_file_is_named(path: Path) -> None:
    """A folder in its place is an error with its path."""
    path.mkdir()
    with pytest.raises(StoreError, match=f"{path}: Is a directory"), exclusive(path, poll_s=0.01):
        raise AssertionError


def test_trouble_that_passes_is_waited_out(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full for a moment delays a turn."""
    tries: list[int] = []
    opened = os.open

    def full(name: Any, *rest: Any, **named: Any) -> int:
        if str(name) == str(path):
            tries.append(1)
            if len(tries) < 3:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return opened(name, *rest, **named)

    monkeypatch.setattr(os, "open", full)
    lent = Lent()
    with lent.to(Patience(limit_s=SOON_S)), exclusive(path, poll_s=0.01, patience=lent) as mine:
        assert mine
    assert len(tries) == 3
