"""The process that `background.Builders` starts: it builds one schedule into the store. Reads its order from stdin."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from pathlib import Path

import torch

from nimble_jobs.errors import NimbleError
from nimble_jobs.planner.ahead import build_ahead
from nimble_jobs.planner.background import request_of
from nimble_jobs.planner.request import key_parts, schedule_key
from nimble_jobs.store import open_store

log = logging.getLogger(__name__)

FAILED = 1


def main() -> int:
    """Exit code 0 where the schedule is stored now."""
    logging.basicConfig(level=logging.WARNING, format="builder: %(message)s")
    with os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=0) as pipe:
        order = json.loads(pipe.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    device, request = torch.device(order["device"]), request_of(order)
    torch.set_num_threads(order["threads"])
    try:
        key = schedule_key(key_parts(request, device))
        if key != order["key"]:
            log.error("the key here is %s, not %s: this process is not set up as its parent is", key, order["key"])
            return FAILED
        with open_store(Path(order["home"])) as store:
            ahead = build_ahead(request, device=device, store=store)
    except NimbleError as error:
        log.error("%s", error)
        return FAILED
    if ahead.fallback is not None:
        log.error("%s", ahead.fallback)
        return FAILED
    return 0


def _end_with_parent() -> None:
    """The parent holds the other end of the pipe until it ends."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(FAILED)


if __name__ == "__main__":
    sys.exit(main())
