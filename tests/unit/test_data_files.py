"""Flushing many files: with their file system in one step, if the system can, else one by one."""

from __future__ import annotations

import ctypes
import errno
from pathlib import Path
from types import SimpleNamespace

import pytest

from nimble_jobs.data import files


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files that were flushed one by one."""
    names: list[str] = []
    monkeypatch.setattr(files, "sync_path", lambda path: names.append(path.name))
    return names


def made(folder: Path, count: int) -> list[Path]:
    paths = [folder / str(number) for number in range(count)]
    for path in paths:
        path.touch()
    return [*paths, folder]


def library(monkeypatch: pytest.MonkeyPatch, code: int) -> list[str]:
    """The C library, whose `syncfs` fails with `code` unless that is 0. Returns the paths that it is called with."""
    called: list[str] = []

    def syncfs(descriptor: int) -> int:
        called.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        ctypes.set_errno(code)
        return -1 if code else 0

    monkeypatch.setattr(ctypes, "CDLL", lambda *_given, **_how: SimpleNamespace(syncfs=syncfs))
    return called


def test_many_files_are_flushed_in_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flushed: list[str]
) -> None:
    """A few are flushed one by one, since other files of the system may be many."""
    called = library(monkeypatch, 0)
    files.sync_all(made(tmp_path, files.MANY - 1))
    assert called == []
    assert len(flushed) == files.MANY
    files.sync_all(made(tmp_path, files.MANY))
    assert called == [str(tmp_path)]
    assert len(flushed) == files.MANY


@pytest.mark.parametrize("code", [None, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_system_that_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flushed: list[str], code: int | None
) -> None:
    """Each file is flushed, and the folder last."""
    if code is None:
        monkeypatch.setattr(ctypes, "CDLL", lambda *_given, **_how: SimpleNamespace())
    else:
        library(monkeypatch, code)
    paths = made(tmp_path, files.MANY)
    files.sync_all(paths)
    assert flushed == [path.name for path in paths]


def test_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be written is an error, not another try."""
    library(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        files.sync_all(made(tmp_path, files.MANY))


def test_the_real_one(tmp_path: Path, flushed: list[str]) -> None:
    """Linux has it."""
    files.sync_all(made(tmp_path, files.MANY))
    assert flushed == []
