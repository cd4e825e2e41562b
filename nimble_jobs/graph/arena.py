"""A growing range of bytes with free ranges in it, each guarded by what must have finished before its next use."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from nimble_jobs.graph.clocks import Guard, knows

TRIES = 32  # free ranges of enough room that are looked at before adjacent ones are
RANGES = 256  # free ranges that are kept apart before adjacent ones are joined
WINDOW = 64  # free ranges, the last, that are looked at for adjacent ones


class Arena:
    """Best fit over free ranges, with a bounded search, so that a request takes bounded time.

    Without `thorough` it looks for single ranges only, which serves where little can be known to be safe.
    """

    def __init__(self, *, thorough: bool = True) -> None:
        self.thorough = thorough
        self.end = 0  # bytes so far
        self.starts: list[int] = []  # of the free ranges, ascending
        self.ranges: dict[int, tuple[int, Guard]] = {}  # by start: size and guard
        self.by_size: list[tuple[int, int]] = []  # (size, start), ascending
        self.patience = RANGES

    def take(self, size: int, clock: Sequence[int], own: int | None) -> int:
        """Offset of `size` bytes for one who knows `clock` on stream `own`: free ones if safe, or else new."""
        if not size:
            return 0
        low = bisect_left(self.by_size, (size, -1))
        for _, start in self.by_size[low : low + TRIES]:
            if knows(clock, self.ranges[start][1], own):
                return self._use([start], size)
        return self._use(self._run(size, clock, own) if self.thorough else [], size)

    def give(self, start: int, size: int, guard: Guard) -> None:
        """Free a range for whoever knows that the tasks of `guard` have finished."""
        if size:
            self._add(start, size, guard)
            if len(self.starts) > self.patience:
                self._tidy()
                self.patience = max(RANGES, 2 * len(self.starts))

    def _run(self, size: int, clock: Sequence[int], own: int | None) -> list[int]:
        """Adjacent free ranges with the least room that is enough, or else the last ones, where the arena can grow."""
        best: list[int] = []
        best_room = 0
        run: list[int] = []
        for adjacent in self._adjacent(size):
            run, room = [], 0
            for start in adjacent:
                have, guard = self.ranges[start]
                if not knows(clock, guard, own):
                    run, room = [], 0
                    continue
                run.append(start)
                room += have
                while room - self.ranges[run[0]][0] >= size:
                    room -= self.ranges[run.pop(0)][0]
                if room >= size and (not best or room < best_room):
                    best, best_room = run.copy(), room
        return best or (run if run and run[-1] + self.ranges[run[-1]][0] == self.end else [])

    def _adjacent(self, size: int) -> list[list[int]]:
        """The last free ranges, those without a gap between them together; only where there is room, or at the end."""
        found: list[list[int]] = []
        together: list[int] = []
        begin = end = -1
        for start in self.starts[-WINDOW:]:
            if start != end:
                if end - begin >= size:
                    found.append(together)
                begin, together = start, []
            together.append(start)
            end = start + self.ranges[start][0]
        if end - begin >= size or end == self.end:
            found.append(together)
        return found

    def _use(self, run: list[int], size: int) -> int:
        offset = run[0] if run else self.end
        for start in run:
            have, guard = self._remove(start)
            over = start + have - (offset + size)
            if over > 0:
                self._add(offset + size, over, guard)
        self.end = max(self.end, offset + size)
        return offset

    def _add(self, start: int, size: int, guard: Guard) -> None:
        self.ranges[start] = (size, guard)
        insort(self.starts, start)
        insort(self.by_size, (size, start))

    def _remove(self, start: int) -> tuple[int, Guard]:
        size, guard = self.ranges.pop(start)
        del self.starts[bisect_left(self.starts, start)]
        del self.by_size[bisect_left(self.by_size, (size, start))]
        return size, guard

    def _tidy(self) -> None:
        """Join adjacent ranges; the joint guard asks for what both asked for."""
        joined: list[tuple[int, int, Guard]] = []
        for start in self.starts:
            size, guard = self.ranges[start]
            if joined and joined[-1][0] + joined[-1][1] == start and len(guard) + len(joined[-1][2]) <= TRIES:
                before, room, other = joined.pop()
                both = dict(guard)
                for stream, count in other:
                    both[stream] = max(both.get(stream, 0), count)
                joined.append((before, room + size, tuple(both.items())))
            else:
                joined.append((start, size, guard))
        self.starts = [start for start, _, _ in joined]
        self.ranges = {start: (size, guard) for start, size, guard in joined}
        self.by_size = sorted((size, start) for start, size, _ in joined)
