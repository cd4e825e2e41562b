"""A growing range of bytes with free ranges in it. Each free range has a guard: the tasks that must finish before it
may be used again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence

from nimble_jobs.graph.clocks import FEW, Guard, knows

TRIES = 32  # large enough single ranges that a request tries before it tries adjacent ranges
RANGES = 256  # free ranges that may pile up before adjacent ones are joined
WINDOW = 64  # how many of the last free ranges are searched for adjacent ones
ANYONE, NOBODY = -1, -2  # instead of a stream: any stream may use the range, or none may


class Arena:
    """Best fit over free ranges. The search is bounded, so a request takes bounded time.

    `streams` counts the plan's streams; the first `columns` of them have a column in the clocks. With more than `FEW`
    streams the arena only tries single ranges: with so many streams, few ranges are known to be safe anyway.
    """

    def __init__(self, streams: int, columns: int) -> None:
        self.columns = columns
        self.hidden = streams > columns
        self.thorough = streams <= FEW
        self.end = 0  # bytes so far
        self.starts: list[int] = []  # starts of the free ranges, ascending; kept only for a thorough search
        self.ranges: dict[int, tuple[int, Guard]] = {}  # by start: size and guard
        self.by_size: defaultdict[int | None, list[tuple[int, int]]] = defaultdict(list)  # by user: (size, start)
        self.patience = RANGES

    def take(self, size: int, clock: Sequence[int], own: int | None) -> int:
        """Offset of `size` bytes for a task on stream `own` that knows `clock`: free bytes if safe, else new ones."""
        if not size:
            return 0
        best = self._fit(ANYONE, size, clock, own)
        if own in self.by_size:
            best = min(filter(None, (best, self._fit(own, size, clock, own))), default=None)
        if best:
            return self._use([best[1]], size)
        return self._use(self._run(size, clock, own) if self.thorough else [], size)

    def _fit(self, user: int | None, size: int, clock: Sequence[int], own: int | None) -> tuple[int, int] | None:
        """Size and start of the smallest range of `user` that is large enough and safe; None if there is none."""
        by_size = self.by_size[user]
        low = bisect_left(by_size, (size, -1))
        for fit in by_size[low : low + TRIES]:
            if knows(clock, self.ranges[fit[1]][1], own):
                return fit
        return None

    def give(self, start: int, size: int, guard: Guard) -> None:
        """Free a range. A task may take it once it knows that the tasks of `guard` have finished."""
        if size:
            self._add(start, size, guard)
            if len(self.ranges) > self.patience:
                self._tidy()
                self.patience = max(RANGES, 2 * len(self.ranges))

    def _run(self, size: int, clock: Sequence[int], own: int | None) -> list[int]:
        """Starts of adjacent free ranges with enough room, and as little more as possible.

        If there are none, those at the end of the arena, which can grow behind them.
        """
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
        """Runs of free ranges without a gap between them, by start, among the last `WINDOW`.

        A run counts only if it has `size` bytes or ends with the arena.
        """
        runs: list[list[int]] = []
        together: list[int] = []
        begin = end = -1
        for start in self.starts[-WINDOW:]:
            if start != end:
                if end - begin >= size:
                    runs.append(together)
                begin, together = start, []
            together.append(start)
            end = start + self.ranges[start][0]
        if end - begin >= size or end == self.end:
            runs.append(together)
        return runs

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
        user = self._user(guard)
        if user != NOBODY:
            self.ranges[start] = (size, guard)
            insort(self.by_size[user], (size, start))
            if self.thorough:
                insort(self.starts, start)

    def _remove(self, start: int) -> tuple[int, Guard]:
        size, guard = self.ranges.pop(start)
        by_size = self.by_size[self._user(guard)]
        del by_size[bisect_left(by_size, (size, start))]
        if self.thorough:
            del self.starts[bisect_left(self.starts, start)]
        return size, guard

    def _user(self, guard: Guard) -> int:
        """The stream whose tasks can satisfy a guard, `ANYONE` or `NOBODY`.

        Only a stream's own tasks know about a stream without a column.
        """
        user = ANYONE
        if self.hidden:
            for stream, _ in guard:
                if stream >= self.columns and stream != user:
                    user = stream if user == ANYONE else NOBODY
        return user

    def _tidy(self) -> None:
        """Join adjacent ranges. The joint guard demands what both guards demanded."""
        joined: list[tuple[int, int, Guard]] = []
        for start, (size, guard) in sorted(self.ranges.items()):
            if joined and joined[-1][0] + joined[-1][1] == start and len(guard) + len(joined[-1][2]) <= TRIES:
                before, room, other = joined[-1]
                most = dict(other)
                for stream, count in guard:
                    most[stream] = max(most.get(stream, 0), count)
                both = tuple(most.items())
                if self._user(both) != NOBODY:
                    joined[-1] = (before, room + size, both)
                    continue
            joined.append((start, size, guard))
        self.ranges = {start: (size, guard) for start, size, guard in joined}
        self.starts = list(self.ranges) if self.thorough else []
        self.by_size = defaultdict(list)
        for size, start, guard in sorted((size, start, guard) for start, size, guard in joined):
            self.by_size[self._user(guard)].append((size, start))
