"""The other instances of a stored schedule. A job with few batches, or slow input, may never need them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from nimble_jobs.engine.capture import Instance
from nimble_jobs.errors import DeviceFault, EngineError

T = TypeVar("T")

log = logging.getLogger(__name__)


class Further:
    """Captures the instances besides the first one, each when it is asked for."""

    def __init__(
        self, first: Instance, left: int, make: Callable[[], Instance], check: Callable[[Instance], object]
    ) -> None:
        """`left`: how many there can be, at least one. `make` captures one, and `check` raises CheckFailed if its
        replays differ from the first one's.
        """
        self.left = left  # how many there can still be
        self.made: list[Instance] = []
        self._each_bytes = first.bytes
        self._make_and_check: tuple[Callable[[], Instance], Callable[[Instance], object]] | None = make, check

    @property
    def bytes(self) -> int:
        """Device memory of those that were made, and of those that are left. Each needs as much as the first one: while
        a job runs, what a capture takes cannot be told from what other threads take.
        """
        return (len(self.made) + self.left) * self._each_bytes

    def take(self, use: Callable[[Instance], T]) -> T | None:
        """What `use` makes of one more, which was checked; None if there is none left.

        If one cannot be had, or `use` fails for lack of memory or as a capture fails, the log says why, and none is
        left: the job goes on with those that it has. Raises DeviceFault, and what else `use` raises.
        """
        if self._make_and_check is None:
            return None
        made: Instance | None = None
        make, check = self._make_and_check
        try:
            made = make()
            check(made)
            used = use(made)
        except DeviceFault:
            raise
        except (EngineError, torch.OutOfMemoryError) as e:
            if made is not None:
                made.close()
            there, all_ = 1 + len(self.made), 1 + len(self.made) + self.left
            self._end()
            log.warning("%d of %d instances could be captured, so fewer batches run at once: %s", there, all_, str(e))
            return None
        self.made.append(made)
        self.left -= 1
        if not self.left:
            self._end()
        return used

    def close(self) -> None:
        """Give the memory back."""
        self._end()
        for each in self.made:
            each.close()
        self.made = []

    def _end(self) -> None:
        """There will be no more, and what they are made of is not needed."""
        self.left, self._make_and_check = 0, None
