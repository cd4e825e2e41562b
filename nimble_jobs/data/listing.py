"""Which files an input has, one after another and in no order: a folder with a million of them is never held whole."""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nimble_jobs.data.source import is_glob
from nimble_jobs.errors import DataError
from nimble_jobs.seen import InputFile
from nimble_jobs.spec.files import SUFFIXES
from nimble_jobs.spec.model import InputSpec


def root_of(source: str) -> Path:
    """The folder that paths are relative to: the source itself, the part of a glob without wildcards, or the parent."""
    if is_glob(source):
        fixed = re.split(r"[*?\[]", source, maxsplit=1)[0]
        return Path(fixed) if fixed.endswith("/") else Path(fixed).parent
    path = Path(source)
    return path if path.is_dir() else path.parent


def list_input(spec: InputSpec) -> Iterator[InputFile]:
    """Every file that a reader of this input would open, as it is now. There may be none.

    Images are looked for in all folders below, other formats only in the folder itself. Raises DataError where the
    folder, or a file that is named, is not there: a disk that is not mounted is no empty folder.
    """
    source, suffixes = spec.source, SUFFIXES[spec.format]
    root = root_of(source)
    if is_glob(source):
        if not root.is_dir():
            raise DataError(f"{root}: no such folder; expected files that match {source}")
        for path in glob.iglob(source, recursive=True):  # noqa: PTH207  # absolute patterns
            if spec.format != "images" or path.lower().endswith(suffixes):
                yield from _as_listed(path, os.path.relpath(path, root))
    elif Path(source).is_dir():
        yield from _walk(source, suffixes, below=spec.format == "images")
    elif (one := next(_as_listed(source, Path(source).name), None)) is None:
        raise DataError(f"{source}: no such file or folder; expected an input")
    else:
        yield one


def list_images(source: str, suffixes: tuple[str, ...]) -> tuple[Path, list[str], int]:
    """The folder that names are relative to, sorted paths of files with these suffixes in all folders below or matched
    by a glob, and how many other files there are. Hidden files are left out.

    Raises DataError where the source is not there or a folder cannot be read.
    """
    root = root_of(source)
    if is_glob(source):
        found = [os.path.relpath(p, root) for p in glob.glob(source, recursive=True)]  # noqa: PTH207  # absolute patterns
        names = [Path(n).as_posix() for n in found if n.lower().endswith(suffixes) and not (root / n).is_dir()]
        return root, sorted(names), len(found) - len(names)
    if not Path(source).exists():
        raise DataError(f"{source}: no such file or folder; expected images")
    if not Path(source).is_dir():
        name = Path(source).name
        return (root, [name], 0) if name.lower().endswith(suffixes) else (root, [], 1)
    names, others, known, folders = list[str](), 0, set[str](), [""]
    while folders:
        folder = folders.pop()
        at = os.path.join(source, folder)  # noqa: PTH118  # "" is the folder itself
        if (real := os.path.realpath(at)) in known:
            continue
        known.add(real)
        below: list[str] = []
        before = f"{folder}/" if folder else ""
        with _entries(at) as entries:
            for entry in entries:
                name = entry.name
                if name.startswith("."):
                    continue
                if entry.is_dir():
                    below.append(before + name)
                elif name.lower().endswith(suffixes):
                    names.append(before + name)
                else:
                    others += 1
        folders += sorted(below, reverse=True)
    names.sort()
    return root, names, others


def _entries(folder: str) -> Any:
    try:
        return os.scandir(folder)
    except OSError as e:
        raise DataError(f"{folder}: {e.strerror}; expected a folder that can be read") from e


def _walk(top: str, suffixes: tuple[str, ...], *, below: bool) -> Iterator[InputFile]:
    """Files below a folder, through links to folders too, each real folder once. Hidden ones are left out."""
    folders, known = [""], {os.path.realpath(top)}
    while folders:
        folder = folders.pop()
        try:
            entries = os.scandir(os.path.join(top, folder))  # noqa: PTH118  # "" is the folder itself
        except FileNotFoundError as e:
            if folder:  # somebody removed it meanwhile
                continue
            raise DataError(f"{top}: no such folder; expected an input") from e
        except OSError as e:
            raise DataError(f"{top}/{folder}: {e.strerror}; expected a folder that can be read") from e
        with entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                name = f"{folder}/{entry.name}" if folder else entry.name
                if entry.is_dir():
                    real = os.path.realpath(entry.path)
                    if below and real not in known:
                        known.add(real)
                        folders.append(name)
                elif entry.name.lower().endswith(suffixes):
                    yield from _as_listed(entry.path, name)


def _as_listed(path: str, name: str) -> Iterator[InputFile]:
    """The file; nothing for a folder, and for what vanished meanwhile. A link to nothing has size -1."""
    name = Path(name).as_posix()
    try:
        found = os.stat(path)  # noqa: PTH116  # one of a million
    except OSError:
        if os.path.lexists(path):
            yield InputFile(path=name, size=-1, mtime_ns=0)
        return
    if stat.S_ISREG(found.st_mode):
        yield InputFile(
            path=name,
            size=found.st_size,
            mtime_ns=found.st_mtime_ns,
            inode=found.st_ino,
            ctime_ns=found.st_ctime_ns,
        )
    elif not stat.S_ISDIR(found.st_mode):
        yield InputFile(path=name, size=-1, mtime_ns=0)
