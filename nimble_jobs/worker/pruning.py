"""The duty that prunes: one worker of a state folder does it, once a day."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from nimble_jobs.plural import count
from nimble_jobs.retention import Sweep, rules_of, slot_of
from nimble_jobs.store import Store

log = logging.getLogger(__name__)

INTERVAL_S = 30.0
_TURN = "prune"


class Prune:
    """Prunes once a day from `retention.daily` on, by the rules in `retention`, a small step at each call.

    If no worker ran at that hour, the next one that starts does it.
    """

    name = "prune"
    every_s = INTERVAL_S

    def __init__(self, store: Store) -> None:
        self._store = store
        self._slot: float | None = None  # the last day that a worker has taken
        self._sweep: Sweep | None = None
        self._steps: Iterator[object] = iter(())

    def run(self, now: float) -> bool:
        if self._sweep is None:
            self._begin(now)
            return self._sweep is not None
        try:
            step = next(self._steps, None)
        except BaseException:
            self._steps = self._sweep.steps()  # starts from the beginning, since removed jobs are not listed again
            raise
        if step is None:
            self._end(self._sweep, now)
        return step is not None

    def _begin(self, now: float) -> None:
        settings = self._store.settings.now()
        if settings.retention.daily == "off":
            return
        slot = slot_of(now, settings.retention.daily)
        if slot == self._slot:
            return
        mine = self._store.expiry.take_turn(_TURN, slot, now)
        self._slot = slot
        if mine:
            self._sweep = Sweep(self._store, rules_of(settings), now, remove=True)
            self._steps = self._sweep.steps()

    def _end(self, sweep: Sweep, now: float) -> None:
        self._sweep = None
        done = sweep.done
        for reason in done.trouble:
            log.warning("not removed: %s", reason)
        if not done.rows:
            return
        text = ", ".join(f"{kind}: {number:,}" for kind, number, _ in done.rows)
        log.info("pruned: %s", text)
        data = {"rows": [list(row) for row in done.rows], "trouble": list(done.trouble)}
        removed = count(sum(number for _, number, _ in done.rows), "row")
        self._store.jobs.event("pruned", f"removed {removed} and files: {text}", data=data, now=now)
