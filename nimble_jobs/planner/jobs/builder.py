"""The process that `background.Builders` starts: it builds one schedule into the store. Reads its order from stdin."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from pathlib import Path

import torch

from nimble_jobs.errors import NimbleError
from nimble_jobs.payback import RESTS
from nimble_jobs.planner.jobs.ahead import build_ahead
from nimble_jobs.planner.jobs.background import ALONE, TRY_AGAIN, request_of_order
from nimble_jobs.planner.keys.request import key_parts, schedule_key
from nimble_jobs.planner.search.clock import resting
from nimble_jobs.store import open_store

log = logging.getLogger(__name__)

FAILED = 1
_NICENESS = 10


def main() -> int:
    """Exit code 0 if the schedule is stored now, TRY_AGAIN if another build may store it."""
    logging.basicConfig(level=logging.WARNING, format="builder: %(message)s")
    with os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=0) as pipe:
        order = json.loads(pipe.readline())
    os.nice(_NICENESS)
    manners = Manners(beside=bool(order.get("beside")))
    threading.Thread(target=_listen, args=(manners,), daemon=True).start()
    device, request = torch.device(order["device"]), request_of_order(order)
    torch.set_num_threads(order["threads"])
    try:
        key = schedule_key(key_parts(request, device))
        if key != order["key"]:
            log.error("this process computes the key %s, its parent %s: they are not set up alike", key, order["key"])
            return FAILED
        with open_store(Path(order["home"])) as store, resting(manners.rest):
            ahead = build_ahead(request, device=device, store=store)
            if ahead.fallback is not None:
                store.wanted.failed(key, ahead.fallback, time.time())
    except NimbleError as error:
        log.error("%s", error)
        return TRY_AGAIN if error.retryable else FAILED
    if ahead.fallback is not None:
        log.error("%s", ahead.fallback)
        return FAILED
    return 0


class Manners:
    """Beside a job it rests after each use of the device, until the job has ended."""

    def __init__(self, *, beside: bool) -> None:
        self._alone = threading.Event()
        if not beside:
            self._alone.set()

    def rest(self, used_s: float) -> None:
        """The device was used for so many seconds: leave it to the job for its share."""
        self._alone.wait(used_s * RESTS)

    def alone(self) -> None:
        """No job is there any more."""
        self._alone.set()


def _listen(manners: Manners) -> None:
    """The parent holds the other end of the pipe until it ends, and says when no job is left."""
    while said := os.read(sys.stdin.fileno(), 1):
        if said == ALONE:
            manners.alone()
    os._exit(FAILED)


if __name__ == "__main__":
    sys.exit(main())
