"""The kernel's page cache: fill it with files, drop them from it, and see how much of them it holds."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

_BLOCK = 1 << 24  # bytes read at once


def fill(files: Sequence[Path]) -> None:
    """Read every file once."""
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for _ in pool.map(_read, files):
            pass


def drop(files: Sequence[Path]) -> None:
    """Ask the kernel to forget every file. Pages that are dirty are written first; those that are mapped stay."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def share(files: Sequence[Path]) -> float:
    """Share of the files' pages that are in memory, by mincore(2). Raises OSError where the kernel does not say."""
    pages = there = 0
    for file in files:
        found = _resident(file)
        pages += found.size
        there += int(found.sum())
    return there / pages if pages else 0.0


def arrange(files: Sequence[Path], *, uncached: bool) -> str:
    """Fill the cache with files, or drop them from it. What came of it, in words."""
    if uncached:
        drop(files)
    else:
        fill(files)
    try:
        return in_words(share(files), wanted_cached=not uncached)
    except OSError as e:
        return f"{'dropped' if uncached else 'read before'}, not checked: {e.strerror}"


def in_words(share: float, *, wanted_cached: bool) -> str:
    """`cached`, `uncached`, or how much of the files is cached though it should be otherwise."""
    if wanted_cached:
        return "cached" if share >= 0.99 else f"{share:.0%} cached"
    return "uncached" if share <= 0.01 else f"could not be dropped: {share:.0%} cached"


def _read(file: Path) -> None:
    with file.open("rb", buffering=0) as opened:
        while opened.read(_BLOCK):
            pass


def _resident(file: Path) -> np.ndarray:
    """bool [pages]: which pages of a file are in memory."""
    size = file.stat().st_size
    if size == 0:
        return np.zeros(0, dtype=bool)
    pages = np.zeros(-(-size // mmap.PAGESIZE), dtype=np.uint8)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), size, prot=mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, dtype=np.uint8)
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            length, found = ctypes.c_size_t(size), pages.ctypes.data_as(ctypes.c_void_p)
            code = libc.mincore(ctypes.c_void_p(view.ctypes.data), length, found)
            if code != 0:
                raise OSError(ctypes.get_errno(), f"mincore: {os.strerror(ctypes.get_errno())}", str(file))
        finally:
            del view  # or the mapping could not be closed
    return (pages & 1).astype(bool)
