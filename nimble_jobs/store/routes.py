"""Targets of notifications about a spec's jobs, from the configuration and the spec's own `notify`."""

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
    """The kind of target."""

    WEBHOOK = "webhook"
    COMMAND = "command"
    PING = "ping"


@dataclass(frozen=True, kw_only=True)
class Route:
    """One address, and its events."""

    channel: Channel
    target: str  # an address as written, its variables in place; of a command its words, as a JSON list
    on: frozenset[str]


def routes(configured: NotifySettings, own: Mapping[str, Any] | None) -> tuple[Route, ...]:
    """Each address once, with all of its events.

    The targets of the configuration get messages about every job. The targets of a spec's `notify`, or of the
    configuration if it names none, also get the events in its `on`. A ping gets each start and end, regardless of `on`.
    """
    ours = _targets(configured.webhook, configured.command, configured.ping)
    events_of: dict[tuple[Channel, str], set[str]] = {}
    _add(events_of, ours, configured.on)
    if own is not None:
        command = own.get("command")
        theirs = _targets(own.get("webhook"), tuple(command) if command else None, own.get("ping"))
        _add(events_of, theirs or ours, tuple(own.get("on") or ()))
    return tuple(
        Route(channel=channel, target=target, on=frozenset(on)) for (channel, target), on in sorted(events_of.items())
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
