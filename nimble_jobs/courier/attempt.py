"""One attempt to deliver one notification, on any channel."""

from __future__ import annotations

import json
from collections.abc import Mapping

from nimble_jobs.courier import command, http
from nimble_jobs.courier.http import Post
from nimble_jobs.courier.refusals import NotTaken, Refused
from nimble_jobs.courier.secrets import filled, hidden
from nimble_jobs.settings import NotifySettings
from nimble_jobs.store.notices import Notice
from nimble_jobs.store.routes import STARTED, Channel
from nimble_jobs.version import __version__

TEST = "test"  # does not change the state of a dead man's switch
_PING_PATHS = {STARTED: "/start", "failed": "/fail", "quarantined": "/fail", TEST: "/log"}


async def send(notice: Notice, settings: NotifySettings, environ: Mapping[str, str], now: float) -> None:
    """Deliver it. Raises Refused."""
    try:
        await _send(notice, settings, environ, now)
    except NotTaken as e:
        raise Refused(hidden(str(e), environ), e.retry_after_s) from None


async def _send(notice: Notice, settings: NotifySettings, environ: Mapping[str, str], now: float) -> None:
    content = json.dumps({**notice.body, "delivery_attempt": notice.attempts}, ensure_ascii=False).encode()
    if notice.channel == Channel.COMMAND:
        await command.run(json.loads(notice.target), content, settings.commands, settings.command_timeout)
        return
    headers = {
        "User-Agent": f"nimble-jobs/{__version__}",
        "Nimble-Jobs-Event": notice.event,
        "Nimble-Jobs-Delivery": notice.id,
        "Nimble-Jobs-Attempt": str(notice.attempts),
    }
    address = notice.target
    if notice.channel == Channel.PING:
        address = _ping_address(address, notice)
        content = str(notice.body.get("text", "")).encode()
        headers["Content-Type"] = "text/plain; charset=utf-8"
    else:
        headers["Content-Type"] = "application/json"
    await http.post(
        Post(
            address=filled(address, environ),
            called=address,
            headers=headers,
            content=content,
            hosts=settings.hosts,
            timeout_s=settings.timeout,
            now=now,
        )
    )


def _ping_address(target: str, notice: Notice) -> str:
    """The address by healthchecks.io's convention: the signal follows the path, before a query."""
    path, mark, query = target.partition("?")
    signal = _PING_PATHS.get(notice.event, "")
    return f"{path.rstrip('/') if signal else path}{signal}{mark}{query}"
