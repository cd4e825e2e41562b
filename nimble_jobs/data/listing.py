"""Lists an input's files one by one, in no order, so that a folder with a million files is never held in memory."""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from nimble_jobs.data.source import is_glob
from nimble_jobs.errors import DataError
from nimble_jobs.seen import InputFile
from nimble_jobs.spec.formats import SUFFIXES
from nimble_jobs.spec.model import InputSpec


def root_of(source: str) -> Path:
    """The folder for relative paths: the source itself, the part of a glob before its wildcards, or the parent."""
    if is_glob(source):
        fixed = re.split(r"[*?\[]", source, maxsplit=1)[0]
        return Path(fixed) if fixed.endswith("/") else Path(fixed).parent
    path = Path(source)
    return path if path.is_dir() else path.parent


def list_input(spec: InputSpec) -> Iterator[InputFile]:
    """Every file that a reader of this input would open, in its current state. There may be none.

    Images are searched in all subfolders, other formats only in the folder itself. Raises DataError if the folder or a
    named file is missing, because an unmounted disk must not count as an empty folder.
    """
    source, suffixes = spec.source, SUFFIXES[spec.format]
    root = root_of(source)
    if is_glob(source):
        if not root.is_dir():
            raise DataError(f"{root}: no such folder; expected files that match {source}")
        name_of = _namer(source, root)
        for path in glob.iglob(source, recursive=True):  # noqa: PTH207  # absolute patterns
            if spec.format != "images" or path.lower().endswith(suffixes):
                file = _as_listed(path, name_of(path))
                if file is not None:
                    yield file
    elif Path(source).is_dir():
        for folder, entry in _files(source, below=spec.format == "images"):
            if entry.name.lower().endswith(suffixes):
                file = _as_listed(entry.path, folder + entry.name)
                if file is not None:
                    yield file
    elif (one := _as_listed(source, Path(source).name)) is None:
        raise DataError(f"{source}: no such file or folder; expected an input")
    else:
        yield one


def list_images(source: str, suffixes: tuple[str, ...]) -> tuple[Path, list[str], int]:
    """The folder for relative names, the sorted paths of files with these suffixes (in all subfolders, or matched by a
    glob), and the number of other files. Hidden files are left out.

    Raises DataError if the source is missing or a folder cannot be read.
    """
    root = root_of(source)
    if is_glob(source):
        paths = glob.glob(source, recursive=True)  # noqa: PTH207  # absolute patterns
        name_of = _namer(source, root)
        names = [name_of(p) for p in paths if p.lower().endswith(suffixes) and not os.path.isdir(p)]  # noqa: PTH112  # one of a million
        return root, sorted(names), len(paths) - len(names)
    if not Path(source).exists():
        raise DataError(f"{source}: no such file or folder; expected images")
    if not Path(source).is_dir():
        name = Path(source).name
        return (root, [name], 0) if name.lower().endswith(suffixes) else (root, [], 1)
    names, others = list[str](), 0
    for folder, entry in _files(source, below=True):
        name = entry.name
        if name.lower().endswith(suffixes):
            names.append(folder + name)
        else:
            others += 1
    names.sort()
    return root, names, others


def _namer(pattern: str, root: Path) -> Callable[[str], str]:
    """Gives the names, relative to `root`, of paths that match a glob."""
    if os.path.normpath(pattern) == pattern:  # so all paths begin as the pattern does
        start = re.split(r"[*?\[]", pattern, maxsplit=1)[0].rfind("/") + 1
        return lambda path: path[start:]
    return lambda path: os.path.relpath(path, root)


def _files(top: str, *, below: bool) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """What is no folder, in this folder or in all below too, each with its folder's name relative to `top`: "" or with
    a slash at its end. Hidden ones are left out. Links to folders are followed, but each real folder is listed once, by
    the first of its names.
    """
    folders, known = [""], set[str]()
    while folders:
        folder = folders.pop()
        at = os.path.join(top, folder)  # noqa: PTH118  # "" is the folder itself
        if (real := os.path.realpath(at)) in known:
            continue
        known.add(real)
        try:
            entries = os.scandir(at)
        except FileNotFoundError as e:
            if folder:  # it was removed meanwhile
                continue
            raise DataError(f"{top}: no such folder; expected an input") from e
        except OSError as e:
            raise DataError(f"{at}: {e.strerror}; expected a folder that can be read") from e
        inside: list[str] = []
        before = f"{folder}/" if folder else ""
        with entries:
            for entry in entries:
                if entry.name[0] == ".":
                    continue
                if not _leads_to_folder(entry):
                    yield before, entry
                elif below:
                    inside.append(before + entry.name)
        folders += sorted(inside, reverse=True)


def _leads_to_folder(entry: os.DirEntry[str]) -> bool:
    """False for a link that cannot be followed, too: it is a file that cannot be read."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _as_listed(path: str, name: str) -> InputFile | None:
    """The file; None for a folder or a file that has vanished. A broken link has size -1."""
    try:
        info = os.stat(path)  # noqa: PTH116  # one of a million
    except OSError:
        return InputFile(path=name, size=-1, mtime_ns=0) if os.path.lexists(path) else None
    if stat.S_ISREG(info.st_mode):
        return InputFile(
            path=name,
            size=info.st_size,
            mtime_ns=info.st_mtime_ns,
            inode=info.st_ino,
            ctime_ns=info.st_ctime_ns,
        )
    return None if stat.S_ISDIR(info.st_mode) else InputFile(path=name, size=-1, mtime_ns=0)
