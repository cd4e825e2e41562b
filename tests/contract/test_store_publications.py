"""What the store records of publications, and which attempts have the secret to seal a manifest."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from nimble_jobs.errors import FencedOut, StoreTrouble
from nimble_jobs.job import Publication, Sealer
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from tests.store_samples import NOW, queued


@pytest.fixture
def store(tmp_path: Path, url: str | None) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home")), url) as opened:
        yield opened


def publication_of(job_id: str, token: str = "a" * 32) -> Publication:
    return Publication(token=token, job_id=job_id, path="/out", folder="1:2", manifest_sha256="b" * 64)


def running(store: Store) -> str:
    queued(store, spec={"output": {"path": "/out"}}, name="n", kind="score", now=NOW)
    job = store.jobs.claim("w", device="cpu", now=NOW)
    assert job is not None
    return job.id


def finish(store: Store, job: str, publication: Publication | None, attempt: int = 1) -> bool:
    ended = {"outputs": {"path": "/out"}, "timings": {}, "schedule": {}}
    return store.jobs.finish(job, attempt, **ended, publication=publication, now=NOW)


def test_the_end_records_the_publication(store: Store, url: str | None) -> None:
    """It is found by its token, also after the store was closed; an unknown token finds nothing."""
    job = running(store)
    published = publication_of(job)
    assert store.publications.find(published.token) is None
    assert finish(store, job, published)
    assert store.publications.home == store.home
    with open_store(store.home, url) as again:
        assert again.publications.find(published.token) == published
        assert again.publications.find("c" * 32) is None


def test_only_the_attempt_that_owns_the_job_records_its_publication(store: Store) -> None:
    """A stale attempt has published nothing."""
    job = running(store)
    assert not finish(store, job, publication_of(job), attempt=2)
    store.jobs.cancelled(job, 1, NOW)
    assert not finish(store, job, publication_of(job))
    assert store.publications.find("a" * 32) is None


def test_a_folder_that_two_jobs_share_is_recorded_once(store: Store) -> None:
    """With `if_exists: resume` the second one finds what the first one published, whose row stays as it was."""
    first, second = running(store), running(store)
    assert finish(store, first, publication_of(first))
    assert finish(store, second, publication_of(first))
    store.publications.keep(publication_of(first))
    assert store.publications.find("a" * 32) == publication_of(first)


def test_what_is_kept_without_an_end(store: Store) -> None:
    """Retention records the folders of jobs that go."""
    job = running(store)
    store.publications.keep(publication_of(job))
    assert store.publications.find("a" * 32) == publication_of(job)


def test_only_the_attempt_that_owns_the_job_gets_its_secret(store: Store) -> None:
    """Each attempt has another one. Which job it seals for is known also after its end, but not after the job's."""
    job = running(store)
    key = store.publications.key(job, 1)
    assert len(bytes.fromhex(key)) == 16
    assert store.publications.key(job, 1) == key
    assert key not in repr(store.publications.sealer(job, 1))
    with pytest.raises(FencedOut):
        store.publications.key(job, 2)
    store.jobs.fail(job, 1, error="lost", retry=True, lost=True, now=NOW)
    with pytest.raises(FencedOut):
        store.publications.key(job, 1)
    again = store.jobs.claim("w", device="cpu", now=NOW + 1000)
    assert again is not None
    with pytest.raises(FencedOut):
        store.publications.key(job, 1)
    assert store.publications.key(job, 2) != key
    store.jobs.cancelled(job, 2, NOW)
    with pytest.raises(FencedOut):
        store.publications.key(job, 2)
    assert store.publications.sealer(job, 1) == Sealer(key=key, output="/out")
    assert store.publications.sealer(job, 3) is None
    assert store.publications.sealer("nobody", 1) is None
    store.expiry.remove(store.expiry.ended(above=0, limit=9))
    assert store.publications.sealer(job, 1) is None


def test_an_attempt_that_an_earlier_version_claimed(store: Store) -> None:
    """It gets its secret when it asks, and keeps it."""
    job = running(store)
    with store._database._engine.begin() as connection:
        connection.execute(text("UPDATE attempts SET seal = NULL"))
    assert store.publications.sealer(job, 1) is None
    key = store.publications.key(job, 1)
    assert store.publications.key(job, 1) == key
    assert store.publications.sealer(job, 1) == Sealer(key=key, output="/out")


def test_a_process_that_may_not_write_gets_no_secret(store: Store) -> None:
    """Such as a worker whose lease was not renewed: what it renames, others would see as what it writes."""
    job = running(store)

    def check() -> None:
        raise StoreTrouble("the lease could not be renewed")

    store._database.fences.append(check)
    with pytest.raises(StoreTrouble, match="could not be renewed"):
        store.publications.key(job, 1)
    store._database.fences.remove(check)
    assert store.publications.key(job, 1)


def test_asking_for_the_secret_commits_nothing(store: Store) -> None:
    """What waits for the next transaction goes on waiting: a commit waits for the disk. The end writes it."""
    job = running(store)
    store.jobs.event_soon("note", "of the attempt", job, 1, {}, now=NOW)
    store.publications.key(job, 1)
    assert len(store._database._soon) == 1
    assert finish(store, job, None)
    assert [event.kind for event in store.jobs.events(job)] == ["submitted", "claimed", "note", "succeeded"]


def test_outputs_of_earlier_versions(store: Store) -> None:
    """They are those of jobs that succeeded and have no recorded publication."""
    for recorded in (False, True):
        job = running(store)
        assert store.publications.outputs(job) is None
        assert finish(store, job, publication_of(job) if recorded else None)
        assert store.publications.outputs(job) == (None if recorded else {"path": "/out"})
    assert store.publications.outputs("nobody") is None


def test_a_publication_is_dated(store: Store) -> None:
    """By the end of its job, or when it was kept."""
    job = running(store)
    assert finish(store, job, publication_of(job))
    store.publications.keep(publication_of(job, "b" * 32))
    first, second = store.expiry.published(above="", limit=9)
    assert first.at == NOW
    assert abs(second.at - time.time()) < 60
