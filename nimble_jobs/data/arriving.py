"""Files that are still being fetched into a folder: what is known of them already, and a wait for their bytes."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from nimble_jobs.data.object_inputs import Listing
from nimble_jobs.data.stamps import Names, Stamps
from nimble_jobs.decoding.work import signed

_POLL_S = 0.02  # how often a thread looks whether its files are there


class Arriving:
    """The files of a listing that a reader of the whole copy would find, in its order.

    One thread says which have arrived; any may wait for some.
    """

    def __init__(self, listing: Listing, root: Path) -> None:
        """`root` is where the copy lies."""
        pattern = listing.rest if listing.rest not in listing.objects else ""
        wanted = [not pattern or _matches(name.split("/"), pattern.split("/")) for name in listing.objects]
        names = [name for name, matches in zip(listing.objects, wanted, strict=True) if matches]
        sizes = [stat.size for stat, matches in zip(listing.objects.values(), wanted, strict=True) if matches]
        self._places = np.where(wanted, np.cumsum(wanted) - 1, -1)  # of each object of the listing
        self._facts = np.zeros((len(names), 3), dtype=np.int64)
        self._facts[:, 0] = sizes
        self._there = np.zeros(len(names), dtype=bool)
        self._error: BaseException | None = None
        self._over = threading.Event()
        self.root = root
        self.stamps = Stamps(root, Names(names), self._facts)  # times and inodes of a file once it is there

    def __len__(self) -> int:
        return len(self._there)

    @property
    def over(self) -> bool:
        """Whether `end` was called."""
        return self._over.is_set()

    def put(self, number: int, found: os.stat_result) -> None:
        """The file of an object, by its place in the listing, is there with all its bytes."""
        place = int(self._places[number])
        if place >= 0:
            self._facts[place] = found.st_size, found.st_mtime_ns, signed(found.st_ino)
            self._there[place] = True

    def any(self) -> bool:
        """Whether a file is there."""
        return bool(self._there.any())

    def have(self, start: int, stop: int) -> bool:
        """Whether all of these files are there."""
        return bool(self._there[start:stop].all())

    def wait(self, indexes: np.ndarray) -> None:
        """Wait until these files are there. Raises what `end` was given, if they will not come."""
        while not self._there[indexes].all():
            if self._over.wait(_POLL_S) and not self._there[indexes].all():
                assert self._error is not None
                raise self._error

    def end(self, error: BaseException) -> None:
        """No more files will come, or nobody needs them: whoever waits for one gets this error."""
        if not self._over.is_set():
            self._error = error
            self._over.set()


def _matches(name: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether `glob` finds a file below the folder where its pattern begins; both are in parts. `**` is any folders."""
    if not pattern:
        return not name
    first, rest = pattern[0], pattern[1:]
    if first == "**":
        return bool(name) and (not rest or any(_matches(name[i:], rest) for i in range(len(name))))
    return bool(name) and fnmatchcase(name[0], first) and _matches(name[1:], rest)
