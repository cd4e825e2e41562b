"""Transactions, locks, migrations, and what errors of the database become."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from nimble_jobs.errors import StoreError
from nimble_jobs.store import migrations, open_store
from nimble_jobs.store.database import Database
from nimble_jobs.store.home import resolve
from nimble_jobs.store.sqlite import journal_mode
from nimble_jobs.store.tables import Base
from tests.configured import configure
from tests.store_samples import submit
from tests.waiting import PATIENCE_S


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """A migrated database that loses patience soon."""
    found = Database(f"sqlite:///{tmp_path / 'a.db'}", busy_timeout_s=0.05, patience_s=0.3)
    found.migrate()
    yield found
    found.close()


def count(session: Session) -> int:
    return int(session.execute(text("SELECT count(*) FROM events")).scalar_one())


def add(session: Session) -> None:
    session.execute(text("INSERT INTO events (at, kind, message, data) VALUES (0, 'k', 'm', '{}')"))


def test_migrations_make_the_tables(tmp_path: Path) -> None:
    """A database that went through all versions is one that was made by the newest, to the last index, the order within
    it, and the version that it says.
    """
    migrated, made = tmp_path / "migrated.db", tmp_path / "made.db"
    engine = create_engine(f"sqlite:///{migrated}")
    with engine.begin() as connection:
        migrations.upgrade(connection)
    with engine.connect() as connection:
        opts = {
            "compare_type": True,
            "compare_server_default": True,
            # Alembic cannot compare an index with a descending column; the statements below can.
            "include_object": lambda _object, name, *_: name != "ix_jobs_claim",
        }
        context = MigrationContext.configure(connection, opts=opts)
        differences = compare_metadata(context, Base.metadata)
    engine.dispose()
    assert differences == []
    database = Database(f"sqlite:///{made}")
    database.migrate()
    database.close()
    found = []
    for path in (migrated, made):
        with closing(sqlite3.connect(path)) as connection:
            rows = connection.execute(
                "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql > '' OR name = 'alembic_version'"
            )
            held = sorted((name, " ".join(sql.split())) for name, sql in rows)
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            rows_in = {name: connection.execute(f'SELECT * FROM "{name}"').fetchall() for name in tables}
            found.append((held, rows_in))
    assert found[0] == found[1]


def test_newest_version() -> None:
    """The version that the code expects is the last of the packaged migrations."""
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    config.set_main_option("path_separator", "os")
    assert ScriptDirectory.from_config(config).get_heads() == [migrations.NEWEST]


def test_newer_database(tmp_path: Path) -> None:
    """A database of a newer version is refused with what to do."""
    home = resolve(str(tmp_path / "home"))
    with open_store(home) as store:
        store._database.write(lambda session: session.execute(text("UPDATE alembic_version SET version_num = '9999'")))
    with pytest.raises(StoreError, match=r"newer nimble-jobs .database version 9999"):
        open_store(home)


def test_pragmas(database: Database) -> None:
    """Each connection is durable (FULL), waits for locks, checks foreign keys, and uses the sound journal."""

    def pragma(name: str) -> object:
        return database.read(lambda session: session.execute(text(f"PRAGMA {name}")).scalar())

    assert pragma("journal_mode") == journal_mode().lower()
    assert (pragma("synchronous"), pragma("foreign_keys"), pragma("busy_timeout")) == (2, 1, 50)


@pytest.mark.parametrize(
    ("version", "mode"), [((3, 40, 1), "TRUNCATE"), ((3, 51, 2), "TRUNCATE"), ((3, 51, 3), "WAL"), ((4, 0, 0), "WAL")]
)
def test_journal_mode(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int], mode: str) -> None:
    """The write-ahead log is used only from the version on in which it does not lose pages."""
    monkeypatch.setattr(sqlite3, "sqlite_version_info", version)
    assert journal_mode() == mode


def test_wal_database_is_turned(tmp_path: Path) -> None:
    """A database that another SQLite left in the other journal mode is turned to ours."""
    home = resolve(str(tmp_path / "home"))
    with open_store(home) as store:
        submit(store)
    with closing(sqlite3.connect(home / "nimble-jobs.db")) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    with open_store(home) as store:
        mode = store._database.read(lambda session: session.execute(text("PRAGMA journal_mode")).scalar())
        assert mode == journal_mode().lower()
        assert len(store.jobs.list()) == 1


def test_rolled_back(database: Database) -> None:
    """A transaction that raises leaves nothing behind."""

    def work(session: Session) -> None:
        add(session)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        database.write(work)
    assert database.read(count) == 0


def test_locked(database: Database) -> None:
    """A lock that stays ends in an error that says so; one that goes is waited out."""
    with closing(sqlite3.connect(database.url.database or "", isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match=r"locked by another process for more than 0\.3 s"):
            database.write(add)
        patient = Database(database.url, busy_timeout_s=0.05, patience_s=PATIENCE_S)
        timer = threading.Timer(0.15, other.execute, ["COMMIT"])
        timer.start()
        with closing(patient):
            patient.write(add)
        timer.join()
    assert database.read(count) == 1


def test_lock_from_the_start(database: Database) -> None:
    """A writer has the lock before its first statement, so that what it reads is still so when it writes."""
    with closing(sqlite3.connect(database.url.database or "", isolation_level=None, timeout=0)) as other:

        def work(session: Session) -> None:
            session.connection()
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                other.execute("BEGIN IMMEDIATE")

        database.write(work)
        other.execute("BEGIN IMMEDIATE")


@pytest.mark.parametrize("code", [sqlite3.SQLITE_BUSY, sqlite3.SQLITE_BUSY_SNAPSHOT, sqlite3.SQLITE_LOCKED])
def test_whole_transaction_again(database: Database, code: int) -> None:
    """When the database is busy in the middle, the whole transaction is done again, and counts once."""
    patient = Database(database.url, busy_timeout_s=0.05, patience_s=PATIENCE_S)
    tries = []

    def work(session: Session) -> None:
        tries.append(1)
        add(session)
        if len(tries) < 3:
            error = sqlite3.OperationalError("busy")
            error.sqlite_errorcode = code
            raise OperationalError("", {}, error)

    with closing(patient):
        patient.write(work)
    assert len(tries) == 3
    assert database.read(count) == 1


def test_writers_of_one_process(tmp_path: Path) -> None:
    """Threads share a database: no write is lost."""
    database = Database(f"sqlite:///{tmp_path / 'a.db'}")
    database.migrate()

    def work() -> None:
        for _ in range(20):
            database.write(add)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert database.read(count) == 60
    database.close()


def test_full_disk(database: Database) -> None:
    """A full disk is a sentence, keeps nothing of the change, and the database goes on afterwards."""
    pages = database.read(lambda session: session.execute(text("PRAGMA page_count")).scalar_one())

    def fill(session: Session) -> None:
        session.execute(text(f"PRAGMA max_page_count = {pages}"))
        session.execute(
            text("INSERT INTO events (at, kind, message, data) VALUES (0, 'k', :m, '{}')"), {"m": "x" * 99999}
        )

    with pytest.raises(StoreError, match="no space left"):
        database.write(fill)
    assert database.read(count) == 0


def test_fork(database: Database) -> None:
    """A forked child is told to open the store anew."""
    pid = os.fork()
    if pid == 0:
        try:
            database.read(count)
        except StoreError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert database.read(count) == 0


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nonsense", "NIMBLE_JOBS_DB: found 'nonsense'; expected a SQLAlchemy URL"),
        ("user:secret@host/db", "found an address without ://; expected a SQLAlchemy URL"),
        ("host=h password=secret", "found an address without ://; expected a SQLAlchemy URL"),
        ("nosuch://user:secret@x/y", "found nosuch://; expected a SQLAlchemy URL"),
        (
            "postgresql://user:secret@host/db",
            "found postgresql://; expected a SQLAlchemy URL such",
        ),
        ("mysql+pymysql://user:secret@host/db", r"found mysql\+pymysql://; expected a SQLAlchemy URL"),
        ("postgresql+psycopg://user:pa@secret@host/db", "several @"),
        ("postgresql+psycopg://user:secret@host:port/db", "cannot be read"),
        (
            "postgresql+psycopg://user:secret@[::1/db",
            "NIMBLE_JOBS_DB: the address cannot be read; expected a SQLAlchemy URL",
        ),
        ("postgresql+psycopg://user:sec[ret@host/db", "cannot be read"),
        ("postgresql+psycopg://user:secret@/db?host=/nowhere", "cannot be used"),
        ("postgresql+psycopg://user@/db?host=/nowhere&password=secret", "cannot be used"),
        ("sqlite+nosuch:////tmp/x.db", "expected a SQLAlchemy URL"),
        ("sqlite://", "in memory"),
        ("sqlite:///:memory:", "in memory"),
        ("sqlite:////nowhere/at/all.db", "cannot be opened"),
    ],
)
def test_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, words: str) -> None:
    """NIMBLE_JOBS_DB that cannot be used is an error that says what was expected."""
    monkeypatch.setenv("NIMBLE_JOBS_DB", url)
    with pytest.raises(StoreError, match=words) as caught:
        open_store(resolve(str(tmp_path / "home")))
    assert "secret" not in "".join(traceback.format_exception(caught.value))


def test_where_a_bad_url_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A problem names the place: the variable, the file, or the argument of a caller."""
    home = resolve(str(tmp_path / "home"))
    with open_store(home):
        pass
    bad = "postgresql+psycopg://me@host@host/jobs"
    configure(home, f"database: {bad}\n")
    with pytest.raises(StoreError, match=rf"^{home / 'config.yaml'}: database: the address has several @"):
        open_store(home)
    with pytest.raises(StoreError, match=r"^url: the address has several @"):
        open_store(home, bad)
    monkeypatch.setenv("NIMBLE_JOBS_DB", bad)
    with pytest.raises(StoreError, match=r"^NIMBLE_JOBS_DB: the address has several @"):
        open_store(home)


def test_url_from_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NIMBLE_JOBS_DB names the database; the state folder then has none, only the id by which the file knows it."""
    monkeypatch.setenv("NIMBLE_JOBS_DB", f"sqlite:///{tmp_path / 'elsewhere.db'}")
    home = resolve(str(tmp_path / "home"))
    with open_store(home) as store:
        job = submit(store)
    with open_store(home) as store:
        assert store.jobs.get(job.id) == job
    assert sorted(path.name for path in home.iterdir()) == ["artifacts", "builds", "folder.json", "logs", "workers"]


def test_light_imports(tmp_path: Path) -> None:
    """Opening a current store loads neither Alembic nor torch."""
    home = resolve(str(tmp_path / "home"))
    open_store(home).close()
    code = (
        "import sys; from pathlib import Path; from nimble_jobs.store import open_store; "
        f"open_store(Path({str(home)!r})).close(); print([m for m in ('alembic', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_is_written_soon_comes_with_the_next_transaction(database: Database) -> None:
    """Reads of the same object see it; others see it with the next commit, at the latest when it is closed."""
    with closing(Database(database.url)) as other:
        database.write_soon(add)
        assert other.read(count) == 0
        assert database.read(count) == 1
        database.write_soon(add)
        database.write(add)
        assert other.read(count) == 3
        database.write_soon(add)
        database.close()
        assert other.read(count) == 4


def test_what_is_written_soon_survives_a_transaction_that_fails(database: Database) -> None:
    """It is part of the next one that succeeds, once."""

    def fail(session: Session) -> None:
        raise ValueError

    database.write_soon(add)
    with pytest.raises(ValueError):  # noqa: PT011  # its own error
        database.write(fail)
    database.write(lambda _session: None)
    assert database.read(count) == 1
