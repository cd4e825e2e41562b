"""Flushing files: many with their file system in one step, if the system can, else each by itself."""

from __future__ import annotations

import ctypes
import errno
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from nimble_jobs.data import files
from tests.waiting import PATIENCE_S


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files that were flushed each by itself."""
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
    """A few are flushed each by itself, since other files of the system may be many."""
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
    """Each file is flushed, and the folder."""
    if code is None:
        monkeypatch.setattr(ctypes, "CDLL", lambda *_given, **_how: SimpleNamespace())
    else:
        library(monkeypatch, code)
    paths = made(tmp_path, files.MANY)
    files.sync_all(paths)
    assert sorted(flushed) == sorted(path.name for path in paths)


def test_a_few_are_flushed_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four at a time: each of them waits for the others here."""
    together = threading.Barrier(4, timeout=PATIENCE_S)
    monkeypatch.setattr(files, "sync_path", lambda _path: together.wait())
    files.sync_all(made(tmp_path, 7))


@pytest.mark.parametrize("count", [1, 5])
def test_each_failure_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Whichever file or folder cannot be flushed, that is an error, once the others have been flushed."""
    for broken in made(tmp_path, count):
        flushed: list[str] = []

        def flush(path: Path, broken: Path = broken, flushed: list[str] = flushed) -> None:
            if path == broken:
                raise OSError(errno.EIO, "Input/output error")
            flushed.append(path.name)

        monkeypatch.setattr(files, "sync_path", flush)
        with pytest.raises(OSError, match="Input/output error"):
            files.sync_all(made(tmp_path, count))
        assert broken.name not in flushed
        assert len(flushed) >= count - 2  # each of the four flushes some in turn, and stops at an error


def test_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be written is an error, not another try."""
    library(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        files.sync_all(made(tmp_path, files.MANY))


def test_the_real_one(tmp_path: Path, flushed: list[str]) -> None:
    """Linux has it."""
    files.sync_all(made(tmp_path, files.MANY))
    assert flushed == []
