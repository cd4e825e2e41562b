"""What a PostgreSQL server is like: checks for `doctor`, each with what to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, text
from sqlalchemy.orm import Session

from nimble_jobs.store.postgres import OLDEST

CLOCK_S = 2.0  # clocks of hosts may differ from the server's by this much


@dataclass(frozen=True, kw_only=True)
class ServerFact:
    """One fact about the server. `sound` is false if somebody has to do something."""

    detail: str
    sound: bool = True


_FACTS = text(
    "SELECT current_setting('server_version_num')::int, current_setting('server_version'), pg_backend_pid(), "
    "current_setting('transaction_isolation'), current_setting('fsync'), current_setting('server_encoding'), "
    "pg_is_in_recovery(), current_setting('transaction_read_only'), extract(epoch FROM clock_timestamp())"
)


def look(session: Session, *, now: Callable[[], float] = time.time) -> list[ServerFact]:
    """The facts, from a session whose transaction would write."""
    before = now()
    row = session.execute(_FACTS).one()
    passed_s = now() - before
    return list(_facts(row, session.connection(), before + passed_s / 2, passed_s / 2))


def _facts(row: Any, connection: Connection, middle: float, doubt_s: float) -> Iterator[ServerFact]:
    number, version, process, isolation, fsync, encoding, standby, read_only, clock = row
    pooled = process != getattr(connection.connection.driver_connection, "info").backend_pid  # noqa: B009
    if number < OLDEST:
        yield ServerFact(detail=f"PostgreSQL {version}; expected 14 or newer", sound=False)
    else:
        yield ServerFact(detail=f"PostgreSQL {version}")
    off_s = float(clock) - middle
    if abs(off_s) - doubt_s > CLOCK_S:
        detail = (
            f"this machine's clock is {abs(off_s):.1f} s {'behind' if off_s > 0 else 'ahead of'} the server's; leases "
            "do not depend on it, but the order of the queue, retries and timers do: let NTP set both"
        )
        yield ServerFact(detail=detail, sound=False)
    else:
        yield ServerFact(detail=f"this machine's clock is within {CLOCK_S:g} s of the server's")
    if isolation != "read committed":
        yield ServerFact(detail=f"writes run at {isolation}; expected read committed: remove what sets it", sound=False)
    if pooled:
        detail = (
            "a pooler such as PgBouncer is in between; with pool_mode=transaction, prepared statements fail unless it "
            "is version 1.21 or newer with max_prepared_statements above 0: connect to the server itself, or use "
            "pool_mode=session"
        )
        yield ServerFact(detail=detail, sound=False)
    if standby or read_only == "on":
        yield ServerFact(detail="the server is a standby or read-only; connect to the primary", sound=False)
    if fsync != "on":
        yield ServerFact(detail="fsync is off: a power cut can lose accepted jobs; set fsync = on", sound=False)
    if encoding != "UTF8":
        yield ServerFact(detail=f"the database's encoding is {encoding}; expected UTF8", sound=False)
