"""Refuses changes that another site's page asks for in the user's name (cross-site request forgery).

The cookie's SameSite keeps other sites out, but not other ports of this machine. So a change also needs an `Origin`
that is this server's own, and a token that only our own page can read.
"""

from __future__ import annotations

from nimble_jobs.dashboard.gate.asked import Asked, Refused
from nimble_jobs.dashboard.gate.hosts import Hosts
from nimble_jobs.dashboard.gate.keys import Keys

HEADER = "x-csrf-token"


def check(asked: Asked, hosts: Hosts, keys: Keys) -> Refused | None:
    """For requests that change something. Call it after the check of `Host`."""
    origin, host = asked.one("origin"), asked.one("host") or ""
    own = origin in hosts.origins and origin.partition("://")[2] == host.lower()
    if not own:
        return Refused(status=403, kind="origin", message="changes can be made from this dashboard's own page only")
    if not keys.is_csrf(asked.one(HEADER)):
        return Refused(
            status=403,
            kind="csrf",
            message="the page is older than this dashboard, or is not its own; reload it and try again",
        )
    return None
