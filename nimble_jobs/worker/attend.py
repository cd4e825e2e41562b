"""Holds locks in the state folder, which show others that this process runs, until it is asked to stop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from nimble_jobs.patience import Patience
from nimble_jobs.store import Store, WorkerLease
from nimble_jobs.store.home import identity, vouch
from nimble_jobs.worker import logs, trouble
from nimble_jobs.worker.settings import open_impatient
from nimble_jobs.worker.signals import StopSignals

log = logging.getLogger(__name__)

Body = Callable[[Store, Sequence[WorkerLease], StopSignals], bool]


def attend(home: Path, infos: Sequence[Mapping[str, Any]], body: Body, *, limit_s: float | None = None) -> int:
    """Hold a lock for each of `infos`, which shows it to others, and run `body` until SIGTERM, SIGINT, `limit_s` or
    its end; return 0. If `body` says that its folder was replaced, begin anew.

    Raises SettingsError, StoreError when the state folder cannot be used, HomeReplaced when another one has its place.
    """
    logs.to_stderr()
    known = None

    def work(signals: StopSignals) -> bool:
        nonlocal known
        if known is not None:
            vouch(home, known)
        with closing(open_impatient(home, create=known is None)) as store:
            if known is None:
                store.settings.now()  # no worker starts with an invalid configuration
            known = known or identity(home)
            # Without a lock others cannot see this process, so on a full disk it waits for space first.
            limit_s = store.settings.usable().limits.patience
            patience = Patience(limit_s=limit_s, check=lambda _waited_s: _unless(signals), tell=_tell)
            with ExitStack() as held:
                leases = [held.enter_context(patience.through(partial(store.workers.hold, info))) for info in infos]
                return body(store, leases, signals)

    with StopSignals(limit_s) as signals, suppress(_Told):
        over = work(signals)
        while not over and not signals.asked:
            over = Patience(limit_s=trouble.GONE_S).through(lambda: signals.asked or work(signals))
    return 0


class _Told(Exception):
    """The process was asked to stop before it had begun."""


def _unless(signals: StopSignals) -> None:
    if signals.asked:
        raise _Told


def _tell(reason: str | None) -> None:
    if reason is not None:
        log.error("waiting until this works again: %s", reason)
