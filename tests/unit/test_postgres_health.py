"""What doctor says about a PostgreSQL server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nimble_jobs.errors import StoreError
from nimble_jobs.store import Store, open_store, postgres_health
from nimble_jobs.store.home import resolve
from tests import postgres
from tests.cli import Cli


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with postgres.schema() as url, open_store(resolve(str(tmp_path / "home")), url) as opened:
        yield opened


def told(store: Store, **given: Any) -> list[str]:
    return [f.detail for f in store._database.write(lambda s: postgres_health.look(s, **given)) if not f.sound]


def test_a_server_for_tests(store: Store) -> None:
    """Nothing but what makes it quick: it keeps nothing over a power cut."""
    assert [words.partition(":")[0] for words in told(store)] == ["fsync is off"]
    server = store.server()
    assert server is not None
    assert server[1][0].detail.startswith("PostgreSQL 1")


@pytest.mark.parametrize(("off_s", "word"), [(60.0, "ahead of"), (-60.0, "behind")])
def test_a_clock_that_differs(store: Store, off_s: float, word: str) -> None:
    """By a minute: how much, in which direction, and what depends on it."""
    clock = next(words for words in told(store, now=lambda: time.time() + off_s) if "clock" in words)
    assert f" s {word} the server's" in clock
    assert 59 < float(clock.partition("clock is ")[2].partition(" s")[0]) < 61


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({0: 130005, 1: "13.5"}, "PostgreSQL 13.5; expected 14 or newer"),
        ({2: -1}, "a pooler such as PgBouncer is in between"),
        ({3: "serializable"}, "writes run at serializable"),
        ({5: "LATIN1"}, "encoding is LATIN1"),
        ({6: True}, "standby or read-only"),
        ({7: "on"}, "standby or read-only"),
    ],
)
def test_what_will_not_do(change: dict[int, Any], words: str) -> None:
    """Each is a problem with its own words; without it there is none."""
    sound = [160014, "16.14", 7, "read committed", "on", "UTF8", False, "off", 100.0]
    driver = SimpleNamespace(info=SimpleNamespace(backend_pid=7))
    connection: Any = SimpleNamespace(connection=SimpleNamespace(driver_connection=driver))
    assert [f for f in postgres_health._facts(sound, connection, 100.0, 0.0) if not f.sound] == []
    row = [change.get(place, value) for place, value in enumerate(sound)]
    (problem,) = [f.detail for f in postgres_health._facts(row, connection, 100.0, 0.0) if not f.sound]
    assert words in problem


def test_doctor_and_other_commands_never_show_the_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It comes from the environment and goes nowhere: no command prints it, and no file or row holds it."""
    cli = Cli(tmp_path / "home", capsys)
    with postgres.schema() as url:
        secret = url.replace("postgres@", "postgres:sesame@")
        monkeypatch.setenv("NIMBLE_JOBS_DB", secret)
        for words in (
            ["doctor", "--no-device"],
            ["config", "show"],
            ["ls"],
            ["worker", "ls"],
            ["worker", "service", "install", "--dry-run"],
        ):
            answer = cli(*words)
            assert "sesame" not in answer.out + answer.err
        assert "postgresql+psycopg://postgres:***@/postgres?" in answer.out
        monkeypatch.setenv("NIMBLE_JOBS_DB", secret.replace("?host=", "?host=/nowhere"))
        answer = cli("--debug", "ls")
        assert answer.code != 0
        assert "sesame" not in answer.out + answer.err
    files = [file for file in (tmp_path / "home").rglob("*") if file.is_file()]
    assert all("sesame" not in file.read_text(errors="replace") for file in files)


def test_a_server_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused when the store is opened, before anything is written."""
    monkeypatch.setattr("nimble_jobs.store.postgres.OLDEST", 990000)
    with postgres.schema() as url, pytest.raises(StoreError, match="expected 99 or newer"):
        open_store(resolve(str(tmp_path / "home")), url)
