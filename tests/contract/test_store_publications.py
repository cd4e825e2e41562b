"""What the store notes of publications, and for whom."""

from __future__ import annotations

from pathlib import Path

import pytest

from nimble_jobs.errors import FencedOut
from nimble_jobs.job import Publication
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from tests.store_samples import NOW, queued


def note_of(job_id: str, token: str = "a" * 32) -> Publication:
    return Publication(token=token, job_id=job_id, path="/out", folder="1:2", manifest_sha256="b" * 64)


def running(store: Store) -> str:
    queued(store, spec={}, name="n", kind="score", now=NOW)
    job = store.jobs.claim("w", device="cpu", now=NOW)
    assert job is not None
    return job.id


def test_notes_are_kept(tmp_path: Path, url: str | None) -> None:
    """They are found by their token, also after the store was closed; an unknown token finds nothing."""
    with open_store(resolve(str(tmp_path / "home")), url) as store:
        found = note_of(running(store))
        store.publications.note(found, 1)
        assert store.publications.home == tmp_path / "home"
    with open_store(tmp_path / "home", url) as store:
        assert store.publications.find(found.token) == found
        assert store.publications.find("c" * 32) is None


def test_only_the_attempt_that_owns_the_job_notes(tmp_path: Path, url: str | None) -> None:
    """A stale attempt publishes nothing."""
    with open_store(resolve(str(tmp_path / "home")), url) as store:
        job = running(store)
        with pytest.raises(FencedOut):
            store.publications.note(note_of(job), 2)
        store.jobs.cancelled(job, 1, NOW)
        with pytest.raises(FencedOut):
            store.publications.note(note_of(job), 1)
        assert store.publications.find("a" * 32) is None


def test_outputs_of_earlier_versions(tmp_path: Path, url: str | None) -> None:
    """They are those of jobs that succeeded and have no note."""
    with open_store(resolve(str(tmp_path / "home")), url) as store:
        ids = []
        for noted in (False, True):
            job = running(store)
            if noted:
                store.publications.note(note_of(job), 1)
            assert store.publications.outputs(job) is None
            store.jobs.finish(job, 1, outputs={"path": "/out"}, timings={}, schedule={}, now=NOW)
            ids.append(job)
        assert store.publications.outputs(ids[0]) == {"path": "/out"}
        assert store.publications.outputs(ids[1]) is None
        assert store.publications.outputs("nobody") is None
