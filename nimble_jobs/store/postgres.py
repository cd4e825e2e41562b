"""What PostgreSQL needs: how to connect, who may write beside whom, what errors mean, and which servers will do.

A writing transaction takes one lock of the database, alone or shared, before anything else. Transactions that lock
every row on which they depend share it: claims, progress, ends of attempts. All others run alone, as in SQLite. The
lock belongs to the transaction, so a pooler between client and server does no harm.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.orm import Session

from nimble_jobs.addresses import SECRET_OPTIONS
from nimble_jobs.errors import NimbleError, StoreError, StoreTrouble
from nimble_jobs.spec.units import show
from nimble_jobs.store.lease_table import Shared

OLDEST = 140000  # server_version_num
DRIVER = "postgresql+psycopg"
ALONE, BESIDE = "alone", "beside"  # values of the execution option `begin`

IDLE_S = 5.0  # the server ends a transaction whose client says nothing for this long, and so frees its locks
_LOCK_S = 2.0  # one wait for a lock; the transaction is then repeated
_STORE, _ENDS = 0x6E6A6F62, 0x6E6A656E  # classes of advisory locks: the whole store, ends that others wait for
_CONNECT = {
    "application_name": "nimble-jobs",
    "connect_timeout": "10",
    # A vanished server or network is noticed within half a minute.
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "20000",
}
_BEGIN = (
    f"SELECT set_config('lock_timeout', '{_LOCK_S * 1000:.0f}', true), "
    f"set_config('idle_in_transaction_session_timeout', '{IDLE_S * 1000:.0f}', true), "
    "set_config('synchronous_commit', 'on', true), "
    "pg_advisory_xact_lock{shared}(%d, hashtext(current_schema()))" % _STORE
)
_STATEMENTS = {ALONE: _BEGIN.format(shared=""), BESIDE: _BEGIN.format(shared="_shared")}
_IDENTITY = (
    "SELECT (SELECT system_identifier FROM pg_control_system()), "
    "(SELECT oid FROM pg_database WHERE datname = current_database()), "
    "(SELECT relnamespace FROM pg_class WHERE oid = to_regclass('schedules'))"
)
_END = f"SELECT pg_advisory_xact_lock({_ENDS}, hashtext(current_schema()))"  # a constant

# With `ix_jobs_claim` each claim would sort all queued jobs: PostgreSQL finds no order behind a column that IS NULL.
_CLAIM_INDEX = (
    "CREATE INDEX IF NOT EXISTS ix_jobs_next ON jobs (rank, seq) "
    "WHERE state = 'queued' AND NOT foreground AND NOT held AND blockers = 0 AND group_name IS NULL"
)

_BUSY = {"40001", "40P01", "55P03", "25P03"}  # serialization, deadlock, lock timeout, idle in the transaction
_REFUSED = {"42501", "3F000"}  # who may do what; a wait does not change it
# connection, resources, intervention, system, read-only; who may connect, and to which database
_PASSING = ("08", "53", "57", "58", "25", "28", "3D")

_CHECK_SERVER = "check that the server runs and can be reached"
_CHECK_USER = "check the user, its rights and ~/.pgpass"
_CHECK_DATABASE = "there is no such database; check its name, or make it with createdb"
_CHECK_BOTH = "check the database's name, the user, its rights and ~/.pgpass"
# A failed connect has no SQLSTATE in psycopg, only a message. libpq writes a server's answer into it as
# "SEVERITY:  text", in the server's language; two spaces come nowhere else. So other languages get the widest advice.
_ANSWER = re.compile(r"\S:  (.+)")
_ANSWERS = (
    (re.compile(r"the database system is |too many |remaining connection slots "), _CHECK_SERVER),
    (re.compile(r'database ".*" does not exist'), _CHECK_DATABASE),
    (re.compile(r"authentication failed|role \".*\" |pg_hba\.conf|permission denied"), _CHECK_USER),
)


def check_url(text: str, source: str) -> None:
    """Raises StoreError, which never shows a password, for a PostgreSQL URL that cannot be used.

    Raises ValueError, whose message may quote a part of the URL, for what is no URL at all.
    """
    parts = urlsplit(text)
    if parts.scheme != DRIVER:
        # Without :// nobody knows where a password would be, so only what has room for none is shown.
        plain = "an address without ://" if set(text) & set(":@=") else show(text)
        found = f"{parts.scheme}://" if "://" in text else plain
        raise StoreError(
            f"{source}: found {found}; expected a SQLAlchemy URL such as {DRIVER}://USER@HOST/DATABASE or "
            "sqlite:////absolute/path.db, which belongs to one state folder"
        )
    if parts.netloc.count("@") > 1 or (parts.username is None and "@" in parts.path):
        raise StoreError(f"{source}: the address has several @; write %40 for an @ in the password, and %2F for a /")


def shown(url: URL) -> str:
    """The URL without any password."""
    return url.difference_update_query(SECRET_OPTIONS).render_as_string(hide_password=True)


def create(url: URL) -> Engine:
    """An engine whose connections are kept alive. Raises StoreError if psycopg is missing."""
    given = {name for name, _ in parse_qsl(urlsplit(url.render_as_string(hide_password=False)).query)}
    try:
        return create_engine(url, connect_args={k: v for k, v in _CONNECT.items() if k not in given})
    except ModuleNotFoundError as e:
        raise StoreError(
            f"{shown(url)}: PostgreSQL needs the package {e.name}; install it with: pip install 'nimble-jobs[postgres]'"
        ) from None


def reader(engine: Engine) -> Engine:
    """For transactions that read one state and write nothing."""
    return engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)


def writer(engine: Engine, begin: str) -> Engine:
    """For transactions that begin ALONE or BESIDE others. Each statement sees what was committed before it."""
    return engine.execution_options(isolation_level="READ COMMITTED", postgresql_readonly=False, begin=begin)


def prepare(engine: Engine) -> None:
    """Have each writing transaction begin with its lock."""

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        statement = _STATEMENTS.get(connection.get_execution_options().get("begin", ""))
        if statement is not None:
            connection.exec_driver_sql(statement)


def check_server(connection: Connection, name: str) -> None:
    """Refuse a server that is too old, or a database that cannot hold every text. Raises StoreError."""
    info: Any = connection.connection.driver_connection
    if info.info.server_version < OLDEST:
        raise StoreError(f"{name}: PostgreSQL {info.info.server_version // 10000}; expected {OLDEST // 10000} or newer")
    encoding = info.info.parameter_status("server_encoding")
    if encoding != "UTF8":
        raise StoreError(f"{name}: the database's encoding is {encoding}; expected UTF8")


def identity(connection: Connection) -> str:
    """32 hex digits that name the server's cluster, the database and the schema with the tables.

    They are others after a dump was restored, and the same in a physical copy.
    """
    row = connection.exec_driver_sql(_IDENTITY).one()
    return hashlib.sha256(" ".join(map(str, row)).encode()).hexdigest()[:32]


def create_more(connection: Connection) -> None:
    """Make what SQLite does not need and the database lacks, beside the tables of the newest version."""
    Shared.metadata.create_all(connection)
    connection.exec_driver_sql(_CLAIM_INDEX)


def end_alone(session: Session) -> None:
    """Let the transactions that end jobs for which others wait do so one after another. On SQLite they do anyway."""
    connection = session.connection()
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(_END)


def busy(error: Exception) -> bool:
    """Whether the transaction may succeed when it is repeated at once."""
    return _state(error) in _BUSY


def explain(error: Exception, name: str) -> NimbleError:
    """The error for users that a driver's error stands for. The driver's words hold no password.

    A refused connect counts as trouble that passes: a password may be changed, or a database restored, meanwhile.
    """
    state = _state(error)
    cause = error.orig if isinstance(error, DBAPIError) else error
    words = " ".join(str(cause).split()) or type(cause).__name__
    if state in _REFUSED:
        return StoreError(f"{name}: {words}; {_CHECK_USER}")
    lost = isinstance(error, OperationalError) and (state is None or error.connection_invalidated)
    if lost or (state is not None and state.startswith(_PASSING)):
        return StoreTrouble(f"{name}: cannot be used ({words}); {_advice(error, state)}")
    return StoreError(f"{name}: {type(cause).__name__}: {words}")


def _advice(error: Exception, state: str | None) -> str:
    """What to do about a connection that failed or was lost."""
    if state is not None:
        return _CHECK_DATABASE if state == "3D000" else _CHECK_USER if state.startswith("28") else _CHECK_SERVER
    if not isinstance(error, DBAPIError) or error.connection_invalidated:  # it was lost, and is closed by now
        return _CHECK_SERVER
    tried = getattr(error.orig, "pgconn", None) if error.statement is None else None
    if tried is None:
        return _CHECK_SERVER
    if tried.needs_password:  # the server asked for one, and there was none
        return _CHECK_USER
    answer = _ANSWER.search(tried.error_message.decode(errors="replace"))
    if answer is None:
        return _CHECK_SERVER
    return next((advice for words, advice in _ANSWERS if words.search(answer[1])), _CHECK_BOTH)


def _state(error: Exception) -> str | None:
    cause: Any = error.orig if isinstance(error, DBAPIError) else error
    state = getattr(cause, "sqlstate", None)
    return None if state is None else str(state)
