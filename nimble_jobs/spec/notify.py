"""Notifications about how jobs end: the `notify` part of specs and of config.yaml.

Addresses may hold `${NAME}`, a variable of the process that sends. So a secret is neither in a file nor in the
database.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, get_args
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, Field, ValidationInfo

from nimble_jobs.spec import paths
from nimble_jobs.spec.fields import Frozen
from nimble_jobs.spec.units import BadValue, show

NotifyEvent = Literal["failed", "quarantined", "missed", "recovered", "succeeded"]
EVENTS: tuple[NotifyEvent, ...] = get_args(NotifyEvent)
BAD_NEWS: tuple[NotifyEvent, ...] = ("failed", "quarantined", "missed")
VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
ADDRESS_EXPECTED = "an address such as https://hooks.example.org/new, or a variable such as ${HOOK_URL}"
_PORTS = {"http": 80, "https": 443}
_STRAY = re.compile(r"[^!-~]|[\"<>\\^`{|}]")


def parse_address(text: str) -> SplitResult:
    """The parts of an http or https address without variables. Raises BadValue, which never shows a password."""
    if _STRAY.search(text):
        raise BadValue("found a character that is not allowed in an address", ADDRESS_EXPECTED)
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise BadValue("found an address that cannot be read", ADDRESS_EXPECTED) from None
    if parts.scheme not in ("http", "https") or not host:
        raise BadValue(f"found {show(text)}", ADDRESS_EXPECTED)
    if parts.username is not None or parts.password is not None:
        raise BadValue("found an address with a user name or password", "none, or a variable such as ${HOOK_URL}")
    return parts


def hosts_of(text: str) -> tuple[str, ...] | None:
    """The names by which an address may be allowed: `HOST:PORT`, and `HOST` if the port is the scheme's default.

    None while a variable hides the host. Raises BadValue.
    """
    if VARIABLE.search("/".join(text.split("/", 3)[:3])):
        return None
    parts = parse_address(VARIABLE.sub("x", text))
    host = f"[{parts.hostname}]" if ":" in str(parts.hostname) else str(parts.hostname)
    own = _PORTS[parts.scheme]
    port = parts.port or own
    return (host, f"{host}:{port}") if port == own else (f"{host}:{port}",)


def _address(text: str) -> str:
    if "$" in VARIABLE.sub("", text):
        raise BadValue("found a $ without a variable's name", "${NAME}, or %24 for the character itself")
    if hosts_of(text) is None and not text.startswith(("${", "http://", "https://")):
        raise BadValue(f"found {show(text)}", ADDRESS_EXPECTED)
    return text


def _command(words: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
    for word in words:
        if not word.isprintable():
            raise BadValue(f"found {show(word)}, which holds control characters", "ordinary text")
        if VARIABLE.search(word):
            raise BadValue(
                f"found {show(word)}", "words without variables: the command gets the environment of the worker"
            )
    return (paths.absolute(words[0], (info.context or {}).get("base")), *words[1:])


Address = Annotated[str, AfterValidator(_address)]
Command = Annotated[tuple[str, ...], Field(min_length=1), AfterValidator(_command)]


class NotifySpec(Frozen):
    """Events to report, and where."""

    on: tuple[NotifyEvent, ...] = Field(
        default=BAD_NEWS,
        min_length=1,
        description=f"Events to report: {', '.join(EVENTS)}; by default failed, quarantined and missed.",
    )
    webhook: Address | None = Field(
        default=None,
        description="Address that gets a POST with JSON; its host must be allowed in config.yaml. ${NAME}: a variable.",
        examples=["https://hooks.example.org/${HOOK_TOKEN}"],
    )
    command: Command | None = Field(
        default=None,
        description="Program and arguments; it gets the JSON on standard input. Its folder must be allowed.",
        examples=[["/opt/hooks/tell", "--quietly"]],
    )
    ping: Address | None = Field(
        default=None,
        description="Address of a dead man's switch: /start is added at each start, /fail after a failure.",
        examples=["https://hc-ping.com/${CHECK_ID}"],
    )
