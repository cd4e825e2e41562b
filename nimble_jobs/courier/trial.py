"""Sends a test notification to every target at once, without storing it."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Mapping
from typing import Any

from nimble_jobs.courier.attempt import TEST, send
from nimble_jobs.courier.refusals import Refused
from nimble_jobs.settings import NotifySettings
from nimble_jobs.store.notices import Notice, NoticeState
from nimble_jobs.store.routes import Route, routes


def try_all(settings: NotifySettings, own: Mapping[str, Any] | None) -> list[tuple[str, str, str | None]]:
    """Channel, target and error (None: delivered) of each target of the configuration and of a spec's `notify`."""
    targets = routes(settings, own)

    async def trials() -> list[str | None]:
        return await asyncio.gather(*(_try(route, settings) for route in targets))

    errors = asyncio.run(trials())
    return [(route.channel.value, route.target, error) for route, error in zip(targets, errors, strict=True)]


async def _try(route: Route, settings: NotifySettings) -> str | None:
    now = time.time()
    key = f"test-{secrets.token_hex(4)}"
    body = {"id": key, "event": TEST, "text": "nimble-jobs: this is a test, nothing has happened", "name": TEST}
    notice = Notice(
        id=key,
        event=TEST,
        job_id=None,
        name=TEST,
        channel=route.channel.value,
        target=route.target,
        body=body,
        state=NoticeState.PENDING,
        attempts=1,
        next_at=now,
        since=now,
        leased_until=None,
        created_at=now,
        sent_at=None,
        error=None,
    )
    try:
        await send(notice, settings, os.environ, now)
    except Refused as e:
        return str(e)
    return None
