"""One POST with limits on connecting, on each answer, on redirects, and on the total time."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from urllib.parse import urljoin, urlsplit

import httpx2

from nimble_jobs.courier.refusals import NotTaken
from nimble_jobs.settings.allowed import about_host
from nimble_jobs.spec.notify import hosts_of
from nimble_jobs.spec.units import BadValue

_REDIRECTS = 3
_FOLLOWED = (301, 302, 307, 308)  # redirects that repeat the POST; 303 asks for a GET
_WAITS = 3  # the total time may be this many times the limit on one wait
_MOST_RETRY_AFTER_S = 3600.0

# These loggers would log addresses, which hold secrets.
for _name in ("httpx2", "httpcore2"):
    logging.getLogger(_name).setLevel(logging.WARNING)


@dataclass(frozen=True, kw_only=True)
class Post:
    """A message and its address. `now`: Unix seconds, for answers with a date."""

    address: str
    called: str  # the address with its variables unfilled
    headers: dict[str, str]
    content: bytes
    hosts: tuple[str, ...]  # allowed hosts
    timeout_s: float  # limit for a connection, and for an answer
    now: float


def longest_s(timeout_s: float) -> float:
    """The limit on a whole POST."""
    return _WAITS * timeout_s


async def post(what: Post) -> None:
    """Send it. Raises NotTaken for anything but an answer of 200 to 299; its text holds no address."""
    limits = httpx2.Timeout(what.timeout_s)
    try:
        async with asyncio.timeout(longest_s(what.timeout_s)):
            async with httpx2.AsyncClient(timeout=limits, follow_redirects=False) as client:
                await _post(client, what)
    except TimeoutError:
        raise NotTaken(f"no answer within {longest_s(what.timeout_s):g} s") from None
    except httpx2.ConnectTimeout:
        raise NotTaken(f"no connection within {what.timeout_s:g} s") from None
    except httpx2.TimeoutException:
        raise NotTaken(f"no answer within {what.timeout_s:g} s") from None
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as e:
        raise NotTaken(f"{type(e).__name__}: {e}") from None


async def _post(client: httpx2.AsyncClient, what: Post) -> None:
    address = what.address
    for _ in range(_REDIRECTS + 1):
        _check(address, what.hosts, what.called if address == what.address else address)
        async with client.stream("POST", address, content=what.content, headers=what.headers) as answer:
            if answer.is_success:
                return
            location = answer.headers.get("location")
            if answer.status_code not in _FOLLOWED or not location:
                wait_s = _retry_after_s(answer.headers.get("retry-after"), what.now)
                raise NotTaken(f"answered {answer.status_code} {answer.reason_phrase}".rstrip(), wait_s)
            following = urljoin(address, location)
            if urlsplit(address).scheme == "https" != urlsplit(following).scheme:
                raise NotTaken("redirected from https to http, which is not followed")
            address = following
    raise NotTaken(f"redirected more than {_REDIRECTS} times")


def _check(address: str, hosts: tuple[str, ...], called: str) -> None:
    """Raises NotTaken for an address that is not allowed. `called`: the address for messages."""
    try:
        problem = about_host(address, hosts)
    except BadValue:  # the error's text may show a variable's value
        raise NotTaken("the address, with its variables filled in, is neither http nor https") from None
    if problem is not None:
        if hosts_of(called) is None:
            problem = f"the host of {called} is not allowed"
        raise NotTaken(f"{problem}; allow it under notify.hosts in config.yaml")


def _retry_after_s(text: str | None, now: float) -> float | None:
    """The wait in a Retry-After header, given as seconds or as a date; None if it cannot be read."""
    if text is None:
        return None
    try:
        wait_s = float(text) if text.strip().isdigit() else parsedate_to_datetime(text).timestamp() - now
    except (ValueError, OverflowError):
        return None
    return min(max(wait_s, 0.0), _MOST_RETRY_AFTER_S)
