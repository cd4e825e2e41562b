"""Who may ask at all: whoever has the token of the printed address, or the cookie for which it was exchanged."""

from __future__ import annotations

from nimble_jobs.dashboard.gate.asked import Asked, Refused
from nimble_jobs.dashboard.gate.keys import Keys

METRICS = "/metrics"
_BEARER = "bearer "
_LONGEST = 4096  # characters of a Cookie header that are looked at


def exchanges(asked: Asked, keys: Keys) -> bool:
    """Whether this is `GET /?token=...` with the right token, which is answered with the cookie."""
    return asked.method == "GET" and asked.path == "/" and keys.is_token(asked.parameter("token"))


def check(asked: Asked, keys: Keys, *, open_metrics: bool = False) -> Refused | None:
    """The cookie; for a request that changes nothing, `Authorization: Bearer TOKEN` does as well."""
    if has_cookie(asked, keys):
        return None
    if not asked.changes:
        if open_metrics and asked.path == METRICS:
            return None
        word = asked.one("authorization") or ""
        if word[: len(_BEARER)].lower() == _BEARER and keys.is_token(word[len(_BEARER) :].strip()):
            return None
    return Refused(
        status=401,
        kind="token",
        message="not signed in; open the address that `nimble-jobs dashboard` printed, with its token",
    )


def has_cookie(asked: Asked, keys: Keys) -> bool:
    """Whether exactly one cookie of our name was sent, with the right value."""
    pairs = [pair.partition("=") for header in asked.all("cookie") for pair in header[:_LONGEST].split(";")]
    values = [value.strip() for name, _, value in pairs if name.strip() == keys.cookie_name]
    return len(values) == 1 and keys.is_cookie(values[0])


def set_cookie(keys: Keys) -> str:
    """The `Set-Cookie` header: no script can read it, and no other site's request carries it."""
    return f"{keys.cookie_name}={keys.cookie}; Path=/; HttpOnly; SameSite=Strict"
