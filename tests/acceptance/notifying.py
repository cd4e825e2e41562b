"""Processes that end jobs and that send notifications, to be killed at any moment.

`python notifying.py HOME (end | send | cron)`
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path

from nimble_jobs.courier import Courier, courier
from nimble_jobs.errors import StoreError
from nimble_jobs.store import Store, open_store
from nimble_jobs.worker import cron


def end_jobs(store: Store) -> None:
    """Claim jobs and let them fail, one by one."""
    while True:
        job = store.jobs.claim("0-ends", device="cpu", now=time.time())
        if job is None:
            store.jobs.recover((), now=time.time())
            time.sleep(0.02)
        else:
            store.jobs.fail(job.id, job.attempt, error="bad", retry=False, lost=False, now=time.time())


def send(store: Store) -> None:
    """Empty the outbox again and again."""
    sender = Courier(store, "sender", environ={})
    while True:
        with suppress(StoreError):
            sender.deliver()
        time.sleep(0.02)


if __name__ == "__main__":
    if sys.argv[2] == "cron":
        sys.exit(cron.serve(Path(sys.argv[1])))
    courier.LEASE_SPARE_S = 0.2  # those of killed senders lapse soon
    courier.FIRST_S, courier.FURTHEST_S = 0.05, 0.5
    with open_store(Path(sys.argv[1])) as opened:
        {"end": end_jobs, "send": send}[sys.argv[2]](opened)
