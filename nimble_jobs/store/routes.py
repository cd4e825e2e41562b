"""Who is told about the jobs of a spec: what the configuration and the spec's own `notify` say together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nimble_jobs.settings import NotifySettings

STARTED = "started"
_PINGED = frozenset((STARTED, "succeeded", "failed", "quarantined"))


class Channel(StrEnum):
    """How somebody is told."""

    WEBHOOK = "webhook"
    COMMAND = "command"
    PING = "ping"


@dataclass(frozen=True, kw_only=True)
class Route:
    """One address, and what it is told."""

    channel: Channel
    target: str  # an address as written, its variables in place; of a command its words, as a JSON list
    on: frozenset[str]


def routes(configured: NotifySettings, own: Mapping[str, Any] | None) -> tuple[Route, ...]:
    """Each address once, with everything that it is to be told.

    The targets of the configuration hear about every job. Those of a spec's `notify`, or of the configuration where it
    names none, also hear what its `on` says. A ping hears of each start and end, whatever `on` says.
    """
    ours = _targets(configured.webhook, configured.command, configured.ping)
    found: dict[tuple[Channel, str], set[str]] = {}
    _add(found, ours, configured.on)
    if own is not None:
        command = own.get("command")
        theirs = _targets(own.get("webhook"), tuple(command) if command else None, own.get("ping"))
        _add(found, theirs or ours, tuple(own.get("on") or ()))
    return tuple(
        Route(channel=channel, target=target, on=frozenset(on)) for (channel, target), on in sorted(found.items())
    )


def _targets(webhook: str | None, command: tuple[str, ...] | None, ping: str | None) -> tuple[tuple[Channel, str], ...]:
    given = (
        (Channel.WEBHOOK, webhook),
        (Channel.COMMAND, json.dumps(command) if command else None),
        (Channel.PING, ping),
    )
    return tuple((channel, target) for channel, target in given if target)


def _add(
    found: dict[tuple[Channel, str], set[str]], targets: tuple[tuple[Channel, str], ...], on: tuple[str, ...]
) -> None:
    for target in targets:
        found.setdefault(target, set()).update(_PINGED if target[0] is Channel.PING else on)
