"""PostgreSQL for tests: one server for all processes of a test run, started by whoever needs it first.

psycopg is imported where it is used: tests of a GPU run on machines that do not have it.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from tests.postgres_server import WITH_PASSWORD

SUITE = "NIMBLE_JOBS_TESTS_SUITE"  # process id of the test run, for all of its processes
_PLACE = "NIMBLE_JOBS_TESTS_POSTGRES"  # where the server's folder is
_MEMORY = Path("/dev/shm")
_START_S = 60.0
_numbers = itertools.count()


def begin(folders: Path | str | None = None) -> None:
    """Note which process is the test run. Call it before other processes are started.

    `folders`: where the run has its temporary folders. If they are in memory, so is the database: each new schema is a
    hundred new files, which take a disk's file system longer than PostgreSQL takes for all else.
    """
    os.environ.setdefault(SUITE, str(os.getpid()))
    in_memory = folders is not None and _MEMORY in Path(folders).parents
    os.environ.setdefault(_PLACE, str(_MEMORY) if in_memory else tempfile.gettempdir())


@contextmanager
def schema() -> Iterator[str]:
    """The URL of an empty schema of its own."""
    import psycopg

    socket = _server()
    name = f"s{os.getpid()}_{next(_numbers)}"
    with psycopg.connect(host=str(socket), user="postgres", dbname="postgres", autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}")  # type: ignore[arg-type]
        yield f"postgresql+psycopg://postgres@/postgres?host={socket}&options=-csearch_path%3D{name}"
        connection.execute(f"DROP SCHEMA {name} CASCADE")  # type: ignore[arg-type]


@contextmanager
def role(url: str, password: str) -> Iterator[str]:
    """The URL with a role of its own that owns nothing and must give its password, without the password."""
    import psycopg

    name = f"{WITH_PASSWORD}{os.getpid()}_{next(_numbers)}"
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{password}'")  # type: ignore[arg-type]
        yield url.replace("postgres@", f"{name}@")
        connection.execute(f"DROP ROLE {name}")  # type: ignore[arg-type]


def alter(url: str, role_url: str, password: str) -> None:
    """Give the role in `role_url` another password."""
    import psycopg

    name = urlsplit(role_url).username
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f"ALTER ROLE {name} PASSWORD '{password}'")  # type: ignore[arg-type]


def empty(url: str) -> None:
    """Remove all rows of the store in a schema, which costs less than a new one."""
    import psycopg

    tables = "SELECT quote_ident(tablename) FROM pg_tables WHERE schemaname = current_schema()"
    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        names = [name for (name,) in connection.execute(tables) if name != "alembic_version"]
        if names:
            connection.execute(f"TRUNCATE {', '.join(names)} RESTART IDENTITY")  # type: ignore[arg-type]


def _server() -> Path:
    """The folder of the running server's socket."""
    suite = os.environ[SUITE]
    folder = Path(os.environ[_PLACE]) / f"nimble-jobs-postgres-{suite}"
    folder.mkdir(mode=0o711, exist_ok=True)
    with (folder / "started").open("a") as started:
        fcntl.flock(started, fcntl.LOCK_EX)
        if started.tell() == 0:
            program = Path(__file__).with_name("postgres_server.py")
            with (folder / "log").open("w") as log:
                command = [sys.executable, str(program), str(folder), suite]
                subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True)
            _await(folder)
            started.write("yes")
    return folder


def _await(folder: Path) -> None:
    import psycopg

    deadline = time.monotonic() + _START_S
    while True:
        try:
            psycopg.connect(host=str(folder), user="postgres", dbname="postgres").close()
            return
        except psycopg.OperationalError:
            if time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL did not start: {(folder / 'log').read_text()}") from None
            time.sleep(0.02)
