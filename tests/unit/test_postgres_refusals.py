"""A PostgreSQL server that refuses a connection: what the user is told, and that running jobs wait."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from nimble_jobs.errors import StoreTrouble
from nimble_jobs.patience import Lent, Patience
from nimble_jobs.store import postgres as store_postgres
from nimble_jobs.store.database import Database
from tests import postgres
from tests.waiting import PATIENCE_S

SERVER = "; check that the server runs and can be reached"
USER = "; check the user, its rights and ~/.pgpass"
DATABASE = "; there is no such database; check its name, or make it with createdb"
BOTH = "; check the database's name, the user, its rights and ~/.pgpass"


def one(session: Session) -> int:
    return int(session.execute(text("SELECT 1")).scalar_one())


def refusal(url: str) -> str:
    """What a command says that connects to this database."""
    database = Database(url)
    try:
        with pytest.raises(StoreTrouble) as refused:
            database.read(one)
    finally:
        database.close()
    return str(refused.value)


def test_a_wrong_password_and_none() -> None:
    """The advice is about the password, which is not shown."""
    with postgres.schema() as url, postgres.role(url, "sesame") as role:
        wrong = refusal(role.replace("@", ":open-barley@", 1))
        assert "password authentication failed" in wrong
        assert wrong.endswith(USER)
        assert "barley" not in wrong
        assert refusal(role).endswith(USER)


def test_a_missing_database_and_a_missing_role() -> None:
    """Each is named for what it is; a server that is away still is one that cannot be reached."""
    with postgres.schema() as url:
        missing = refusal(url.replace("@/postgres?", "@/nowhere?"))
        assert missing.endswith(f'database "nowhere" does not exist){DATABASE}')
        assert refusal(url.replace("postgres@", "nobody@")).endswith(f'role "nobody" does not exist){USER}')
        assert refusal(url.replace("?host=", "?host=/nowhere")).endswith(SERVER)


def test_a_job_waits_until_the_password_is_right() -> None:
    """Whoever changes it at the server and in ~/.pgpass cannot do both at once."""
    patience, told = Lent(), threading.Event()
    with postgres.schema() as url, postgres.role(url, "before") as role:
        database = Database(role.replace("@", ":after@", 1), patience=patience)

        def changed(_waited_s: float) -> None:
            if not told.is_set():  # the first connect was refused
                told.set()
                postgres.alter(url, role, "after")

        try:
            with patience.to(Patience(limit_s=PATIENCE_S, check=changed)):
                assert database.read(one) == 1
        finally:
            database.close()
        assert told.is_set()


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ("failed: FATAL:  the database system is starting up", SERVER),
        ("failed: FATAL:  sorry, too many clients already", SERVER),
        ("failed: FATAL:  no pg_hba.conf entry for host", USER),
        ("failed: FATAL:  permission denied for database x", USER),
        ("fehlgeschlagen: FATAL:  Datenbank »x« existiert nicht", BOTH),
        ("failed: ВАЖНО:  пользователь не прошёл проверку подлинности", BOTH),
        ("failed: Connection refused\n\tIs the server running on that host?", SERVER),
    ],
)
def test_answers_in_any_language(message: str, advice: str) -> None:
    """A server that answers can be reached, whatever its words are."""
    tried = SimpleNamespace(needs_password=False, error_message=f"connection to server {message}\n".encode())
    driver = RuntimeError(message)
    driver.pgconn = tried  # type: ignore[attr-defined]
    found = store_postgres.explain(OperationalError(None, None, driver), "db")
    assert isinstance(found, StoreTrouble)
    assert str(found).endswith(advice)


@pytest.mark.parametrize(("state", "advice"), [("28P01", USER), ("3D000", DATABASE), ("57P03", SERVER)])
def test_a_code_goes_before_words(state: str, advice: str) -> None:
    """A driver that names the server's code needs no message."""
    driver = RuntimeError("refused")
    driver.sqlstate = state  # type: ignore[attr-defined]
    found = store_postgres.explain(OperationalError(None, None, driver), "db")
    assert isinstance(found, StoreTrouble)
    assert str(found).endswith(advice)
