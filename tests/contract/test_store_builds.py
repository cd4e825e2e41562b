"""One builder for each key, and no artifact deleted under those who load or store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nimble_jobs.errors import StoreError
from nimble_jobs.store import Store, Wait, open_store
from nimble_jobs.store import artifacts as artifacts_module
from nimble_jobs.store.home import resolve
from tests.store_samples import key_of

KEY, OTHER = key_of("a"), key_of("b")


@pytest.fixture
def store(tmp_path: Path, url: str | None) -> Iterator[Store]:
    """A new store."""
    with open_store(resolve(str(tmp_path / "home")), url) as opened:
        yield opened


def nobody(_wait: Wait) -> None:
    raise AssertionError("there is nobody to wait for")


def test_only_one_builds_a_key(store: Store) -> None:
    """The second waits, hears who builds, and may build all the same after its limit; other keys are free."""
    waits: list[Wait] = []
    with store.builds.turn(KEY, limit_s=0.25, waiting=nobody) as first:
        with store.builds.turn(OTHER, limit_s=0.25, waiting=nobody) as other:
            assert (first, other) == (True, True)
        with store.builds.turn(KEY, limit_s=0.25, waiting=waits.append) as second:
            assert second is False
        assert {(wait.pid, wait.limit_s) for wait in waits} == {(os.getpid(), 0.25)}
        assert all(0 <= wait.waited_s < 0.25 for wait in waits)
    with store.builds.turn(KEY, limit_s=0.25, waiting=nobody) as third:
        assert third is True


def test_a_wait_can_be_ended(store: Store) -> None:
    """What the waiting one raises comes through, and leaves the builder alone."""

    def stop(_wait: Wait) -> None:
        raise KeyError("stop")

    with store.builds.turn(KEY, limit_s=60.0, waiting=nobody):
        with pytest.raises(KeyError), store.builds.turn(KEY, limit_s=60.0, waiting=stop):
            raise AssertionError
        with store.builds.turn(KEY, limit_s=0.0, waiting=nobody) as mine:
            assert mine is False


def test_a_build_that_fails_lets_go(store: Store) -> None:
    """The next one has its turn at once, and the lock file names nobody."""
    with pytest.raises(KeyError), store.builds.turn(KEY, limit_s=60.0, waiting=nobody):
        raise KeyError
    with store.builds.turn(KEY, limit_s=60.0, waiting=nobody) as mine:
        assert mine is True
    assert (store.home / "builds" / f"{KEY}.lock").read_bytes() == b""


def test_whoever_deletes_artifacts_waits_for_those_who_use_them(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Users do not hinder each other; a deletion beside one is refused, and one is never met by a user."""
    monkeypatch.setattr(artifacts_module, "PATIENCE_S", 0.1)
    refused = pytest.raises(StoreError, match="locked by another process")
    with store.artifacts.in_use(), store.artifacts.in_use(), refused, store.artifacts.alone():
        raise AssertionError
    with store.artifacts.alone(), refused, store.artifacts.in_use():
        raise AssertionError
    with store.artifacts.in_use():
        pass
