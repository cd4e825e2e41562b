"""The names under which the server may be asked.

A web site can point a name of its own at 127.0.0.1 (DNS rebinding). The browser then lets its scripts read this server,
but it sends that name in `Host`. So each request, for static files too, must name a host on the list.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from nimble_jobs.dashboard.gate.asked import Asked, Refused
from nimble_jobs.errors import UsageError

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_NAME = re.compile(r"([a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_])?|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?")
_DEFAULT_PORTS = {"http": "80", "https": "443"}


class Hosts:
    """The allowed values of `Host`, and the origins of pages that this server serves."""

    def __init__(self, port: int, more: Sequence[str] = ()) -> None:
        """`more`: further names, `NAME` or `NAME:PORT`. Raises UsageError for one that is not a host name."""
        origins = {f"http://{name}:{port}" for name in _LOOPBACK}
        for text in more:
            matched = _NAME.fullmatch(text.lower())
            if matched is None:
                raise UsageError(f"--allow-host: found {text!r}; expected a host name such as gpu.example.org")
            # A proxy may add TLS, and may listen on the usual port or on ours.
            ports = [matched[2]] if matched[2] else [str(port), *_DEFAULT_PORTS.values()]
            origins |= {f"{scheme}://{matched[1]}:{each}" for scheme in _DEFAULT_PORTS for each in ports}
        self.origins = frozenset(map(_bare, origins))
        self.allowed = frozenset(origin.partition("://")[2] for origin in self.origins)

    def check(self, asked: Asked) -> Refused | None:
        """Exactly one `Host`, and one that is on the list."""
        host = asked.one("host")
        if host is None:
            return Refused(status=400, kind="host", message="the request must have exactly one Host header")
        if host.lower() not in self.allowed:
            return Refused(
                status=403,
                kind="host",
                message="this host name is not allowed; start the dashboard with --allow-host NAME to allow it",
            )
        return None


def _bare(origin: str) -> str:
    """The origin as browsers write it: without the default port of its scheme."""
    scheme = origin.partition("://")[0]
    return origin.removesuffix(f":{_DEFAULT_PORTS[scheme]}")
