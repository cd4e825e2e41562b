"""Models and graphs that stay on the device between jobs, within a budget of bytes; the least recently used leave."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from nimble_jobs.planner import Resident

log = logging.getLogger(__name__)

_DEVICE_SHARE = 0.8  # the rest is for allocations beside the graphs, and for the libraries' workspaces
_HOST_SHARE = 0.5
_APART_S = 1.0  # between two reports, while several values follow each other


class Residents:
    """Values by key, within a budget of bytes. Values that the current job has used stay."""

    def __init__(self, budget_bytes: int, on_change: Callable[[dict[str, int]], None] = lambda _held: None) -> None:
        """`on_change` gets the bytes of each value by key, the least recently used first."""
        self.budget_bytes = budget_bytes
        self._on_change = on_change
        self._values: OrderedDict[str, Resident] = OrderedDict()  # least recently used first
        self._in_use: set[str] = set()
        self._several = self._untold = False
        self._told_at = 0.0

    @property
    def keys(self) -> tuple[str, ...]:
        """Least recently used first."""
        return tuple(self._values)

    @property
    def used_bytes(self) -> int:
        return sum(value.bytes for value in self._values.values())

    @contextmanager
    def several(self) -> Iterator[Callable[[], None]]:
        """A block in which several values follow each other. Changes are told once a second, at its end, and when the
        function is called, as before something that takes long. Each report is a commit, and says all that is held.
        """
        outer, self._several, self._told_at = self._several, True, time.monotonic()
        try:
            yield self._tell_rest
        except BaseException:
            self._several = outer
            try:
                self._tell_rest()
            except Exception as e:  # noqa: BLE001 - what the block raised says more
                log.warning("residents could not be told of: %s", e)
            raise
        self._several = outer
        if not outer:
            self._tell_rest()

    def _tell_rest(self) -> None:
        if self._untold:
            self._told_at, self._untold = time.monotonic(), False
            self._on_change({key: value.bytes for key, value in self._values.items()})

    def _tell(self) -> None:
        self._untold = True
        if not self._several or time.monotonic() - self._told_at >= _APART_S:
            self._tell_rest()

    def begin(self) -> None:
        """A new job starts, and nothing is in use yet. Evict what the last job needed beyond the budget.

        The most recently used value stays even if it is larger than the budget: the next job is likely to need it.
        """
        self._in_use = set(self.keys[-1:])
        self.make_room(0)
        self._in_use.clear()

    def get(self, key: str) -> Resident | None:
        """The value under `key`, which becomes the most recently used and counts as in use."""
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
            self._in_use.add(key)
        return value

    def put(self, key: str, value: Resident) -> None:
        """Keep `value`, as in use, and evict others to fit the budget. A value larger than the budget is kept too."""
        old = self._values.pop(key, None)
        if old is not None and old is not value:
            old.close()
        self._evict(value.bytes)
        self._values[key] = value
        self._in_use.add(key)
        self._tell()

    def drop(self, key: str) -> None:
        """Close the value under `key`, in use or not, and keep it no longer."""
        value = self._values.pop(key, None)
        if value is not None:
            value.close()
            self._tell()

    def make_room(self, nbytes: int) -> None:
        """Evict the least recently used until `nbytes` more fit the budget, or all remaining values are in use."""
        if self._evict(nbytes):
            self._tell()

    def clear(self) -> None:
        """Close everything, in use or not: for the end of the process, or after the device ran out of memory."""
        had_any = bool(self._values)
        self._in_use.clear()
        while self._values:
            self._values.popitem(last=False)[1].close()
        if had_any:
            self._tell()

    def _evict(self, nbytes: int) -> bool:
        used = self.used_bytes
        evicted = False
        for key in [k for k in self._values if k not in self._in_use]:
            if used + nbytes <= self.budget_bytes:
                break
            value = self._values.pop(key)
            used -= value.bytes
            log.info("evicted %s, %d bytes", key[:16], value.bytes)
            value.close()
            evicted = True
        return evicted


def default_budget_bytes(device_bytes: int | None) -> int:
    """80 % of a device's own memory. None: it has none, so half of what this process may use of the host's."""
    if device_bytes is not None:
        return int(device_bytes * _DEVICE_SHARE)
    total = int(psutil.virtual_memory().total)
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):  # no control group, or the word "max"
        limit = total
    return int(min(total, limit) * _HOST_SHARE)
