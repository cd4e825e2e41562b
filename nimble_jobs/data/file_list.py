"""The list of files that a job scores, kept in its hidden folder so that each of its attempts scores the same ones.

    .NAME.JOB/files.jsonl     a header line, one line per file, and the SHA-256 of all lines before it

The first writer wins, so a stale attempt cannot replace the list that a newer one uses.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nimble_jobs.data.files import reported
from nimble_jobs.data.hidden import staging_root
from nimble_jobs.regular import NotRegular, open_regular
from nimble_jobs.seen import Counts, FileList, InputFile
from nimble_jobs.whole import sync_path

NAME = "files.jsonl"


def keep_list(path: Path, job_id: str, attempt: int, files: FileList) -> FileList:
    """Write a job's list durably; `path` is its output. Returns the list that counts, since another attempt may have
    been first. Raises DataError if nothing can be written.
    """
    root = staging_root(path, job_id)
    with reported(root):
        root.mkdir(parents=True, exist_ok=True)
        temporary = root / f".tmp-{attempt}-{NAME}"
        digest = hashlib.sha256()
        with temporary.open("wb") as file:
            for line in _lines(files):
                digest.update(line)
                file.write(line)
            file.write(f"{digest.hexdigest()}\n".encode())
            file.flush()
            os.fsync(file.fileno())
        try:
            _claim(temporary, root / NAME)
        except FileExistsError:
            if (earlier := find_list(path, job_id)) is not None:
                temporary.unlink(missing_ok=True)
                return earlier
            temporary.replace(root / NAME)  # the existing file is damaged
        temporary.unlink(missing_ok=True)
        sync_path(root)
        sync_path(root.parent)
    return files


def _claim(temporary: Path, final: Path) -> None:
    """Gives the file its name. Raises FileExistsError if the name is taken."""
    try:
        final.hardlink_to(temporary)
    except OSError as e:
        if e.errno not in (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP):  # a file system without hard links
            raise
        with final.open("xb"):
            pass
        temporary.replace(final)


def find_list(path: Path, job_id: str) -> FileList | None:
    """The list of a job whose output goes to `path`. None if there is none, or if it is damaged."""
    try:
        with open_regular(staging_root(path, job_id) / NAME) as file:
            return _read(iter(file))
    except (FileNotFoundError, NotADirectoryError, NotRegular, ValueError, TypeError, KeyError, StopIteration):
        return None


def _lines(files: FileList) -> Iterator[bytes]:
    head = {"version": 1, "root": files.root, "listed_at": files.listed_at}
    yield _line(head | {"after_run": files.after_run, "counts": files.counts.to_json(), "files": len(files.files)})
    for f in files.files:
        yield _line([f.path, f.size, f.mtime_ns, f.inode])


def _line(value: object) -> bytes:
    return f"{json.dumps(value, separators=(',', ':'))}\n".encode()  # ASCII JSON, which preserves any name


def _read(lines: Iterator[bytes]) -> FileList:
    digest = hashlib.sha256()

    def value() -> Any:
        line = next(lines)
        digest.update(line)
        return json.loads(line)

    head = value()
    if head["version"] != 1:
        raise ValueError("another format")
    files = []
    for _ in range(head["files"]):
        path, size, mtime_ns, inode = value()  # a line of another shape raises
        files.append(InputFile(path=path, size=size, mtime_ns=mtime_ns, inode=inode))
    if next(lines).decode() != f"{digest.hexdigest()}\n":
        raise ValueError("its bytes differ from what was written")
    return FileList(
        root=head["root"],
        listed_at=head["listed_at"],
        after_run=head["after_run"],
        counts=Counts(**head["counts"]),
        files=files,
    )
