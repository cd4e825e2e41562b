"""A process that dies around a publication: which folders the next attempt, another job and retention then trust."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nimble_jobs.data import Staging, stage
from nimble_jobs.data import publish as publication
from nimble_jobs.data.object_manifest import Manifests
from nimble_jobs.errors import FencedOut, ObjectTrouble, OutputExists
from nimble_jobs.job import Job, JobState
from nimble_jobs.objects import Objects, once
from nimble_jobs.retention import Rules, Sweep
from nimble_jobs.spec.model import OutputSpec
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from tests import s3
from tests.store_samples import NOW, queued

LATER = NOW + 10_000.0
WAYS = ["fail", "replace", "resume"]


@pytest.fixture
def store(tmp_path: Path, url: str | None) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home")), url) as opened:
        yield opened


def claimed(store: Store, path: Path, name: str = "n") -> Job:
    """A new job, claimed."""
    queued(store, spec={"output": {"path": str(path)}}, name=name, kind="score", now=NOW)
    return again(store)


def again(store: Store) -> Job:
    """The next attempt."""
    job = store.jobs.claim("w", device="cpu", now=LATER)
    assert job is not None
    return job


def staged(store: Store, path: Path, job: Job, if_exists: str = "fail", basis: str = "b") -> Staging:
    """What an attempt writes, all of it if the output is not there."""
    output = OutputSpec(path=path, format="npy", if_exists=if_exists)  # type: ignore[arg-type]
    staging = Staging(output, job.id, job.attempt, ledger=store.publications, basis=basis)
    if staging.finished is None and not staging.done:
        staging.write_shard(0, {"top1": np.arange(job.attempt, 4 + job.attempt)}, last=True)
    return staging


def published(store: Store, path: Path, job: Job, if_exists: str = "fail", basis: str = "b") -> Staging:
    """An attempt up to the moment before its end is recorded."""
    staging = staged(store, path, job, if_exists, basis)
    staging.publish({}, shards=1)
    return staging


def end(store: Store, job: Job, staging: Staging) -> bool:
    """Record the success of an attempt."""
    assert staging.finished is not None
    ended = {"outputs": staging.finished, "timings": {}, "schedule": {}, "publication": staging.publication}
    return store.jobs.finish(job.id, job.attempt, **ended, now=LATER)


def lose(store: Store, job: Job) -> None:
    """The worker's process died."""
    assert store.jobs.fail(job.id, job.attempt, error="died", retry=True, lost=True, now=NOW)


def doubt(store: Store, path: Path) -> str | None:
    found = publication.find(path, store.publications)
    assert found is not None
    return found.doubt


@pytest.mark.parametrize("if_exists", WAYS)
def test_died_after_the_rename(store: Store, tmp_path: Path, if_exists: str) -> None:
    """Nothing but the folder and the claim are left of the attempt. The next one takes the folder for the job's output,
    writes nothing, and its end records the publication.
    """
    path = tmp_path / "out"
    if if_exists == "replace":
        old = claimed(store, path, "old")
        assert end(store, old, published(store, path, old, basis="old"))
    first = claimed(store, path)
    token = published(store, path, first, if_exists).publication
    assert token is not None
    assert store.publications.find(token.token) is None
    before = (path / "manifest.json").read_bytes()
    lose(store, first)
    second = again(store)
    staging = published(store, path, second, if_exists)
    assert (path / "manifest.json").read_bytes() == before
    assert not end(store, first, staging)
    assert store.publications.find(token.token) is None
    assert end(store, second, staging)
    assert store.publications.find(token.token) == token
    assert sorted(each.name for each in tmp_path.iterdir() if each.name.startswith(".out")) == []


@pytest.mark.parametrize("if_exists", WAYS)
def test_died_before_the_rename(store: Store, tmp_path: Path, if_exists: str) -> None:
    """The complete, sealed folder is still where the attempt staged it. The next one publishes once."""
    path = tmp_path / "out"
    first = claimed(store, path)
    staged(store, path, first, if_exists)._complete({})
    lose(store, first)
    second = again(store)
    assert end(store, second, published(store, path, second, if_exists))
    assert json.loads((path / "manifest.json").read_bytes())["attempt"] == 2
    assert np.load(path / "part-00000.top1.npy").tolist() == [1, 2, 3, 4], "taken over from the first attempt"


def stopped(store: Store, path: Path) -> tuple[Job, Staging, publication.Found, Job]:
    """An attempt that was stopped after its last look before the rename: its job, its staging, and its sealed manifest;
    and the job of the attempt after it.
    """
    first = claimed(store, path)
    stale = staged(store, path, first)
    held = stale._complete({})
    lose(store, first)
    return first, stale, held, again(store)


def test_stopped_before_the_rename(store: Store, tmp_path: Path) -> None:
    """An attempt that was stopped after its last look goes on when another one has published. It finds the output, and
    its end changes nothing.
    """
    path = tmp_path / "out"
    first, stale, held, second = stopped(store, path)
    assert end(store, second, published(store, path, second))
    there = publication.publish(stale._output, stale._folder, held, store.publications)
    assert there.manifest["attempt"] == 2
    assert not store.jobs.finish(
        first.id, 1, outputs={}, timings={}, schedule={}, publication=held.publication, now=LATER
    )


def test_a_stale_attempt_publishes_nothing(store: Store, tmp_path: Path) -> None:
    """It hears of its end by the look before the rename, as long as it makes that."""
    path = tmp_path / "out"
    first = claimed(store, path)
    stale = staged(store, path, first)
    lose(store, first)
    second = again(store)
    for _ in range(2):
        with pytest.raises(FencedOut):
            stale.publish({}, shards=1)
        assert not path.exists()
    store.jobs.cancelled(second.id, 2, LATER)
    with pytest.raises(FencedOut):
        staged(store, path, second).publish({}, shards=1)
    assert not path.exists()


def test_a_stale_attempt_that_is_first(store: Store, tmp_path: Path) -> None:
    """It was stopped after its last look, and renames while the next attempt works, which then takes its folder."""
    path = tmp_path / "out"
    _, stale, held, second = stopped(store, path)
    newer = staged(store, path, second)
    publication.publish(stale._output, stale._folder, held, store.publications)
    newer.publish({}, shards=1)
    assert newer.publication == held.publication
    assert end(store, second, newer)
    assert doubt(store, path) is None


@pytest.mark.parametrize(
    ("how", "pruned"),
    [
        ("running", False),
        *((how, pruned) for how in ("failed", "cancelled", "quarantined") for pruned in (False, True)),
    ],
)
def test_a_folder_whose_job_never_says_so(store: Store, tmp_path: Path, how: str, pruned: bool) -> None:
    """It is this store's all the same, so another job may replace it, also once its own job is gone; and under `resume`
    take it for its own.
    """
    path = tmp_path / "out"
    job = claimed(store, path)
    published(store, path, job, basis="same")
    match how:
        case "failed":
            store.jobs.fail(job.id, 1, error="no", retry=False, now=NOW)
        case "cancelled":
            store.jobs.cancelled(job.id, 1, NOW)
        case "quarantined":
            for number in range(1, job.max_attempts + 1):
                lose(store, job)
                if number < job.max_attempts:
                    job = again(store)
            assert store.jobs.get(job.id).state is JobState.QUARANTINED
    if pruned:
        for _ in Sweep(store, Rules(keep_s=0, keep_failed_s=0), now=LATER, remove=True).steps():
            pass
        assert store.jobs.list() == []
    assert doubt(store, path) is None
    with pytest.raises(OutputExists):
        published(store, path, claimed(store, path, "third"), "fail")
    resumed = claimed(store, path, "resumed")
    staging = published(store, path, resumed, "resume", basis="same")
    assert staging.publication is not None
    assert staging.publication.job_id == job.id
    assert end(store, resumed, staging)
    other = claimed(store, path, "other")
    assert end(store, other, published(store, path, other, "replace", basis="other"))
    found = publication.find(path, store.publications)
    assert found is not None
    assert found.job_id == other.id


def test_a_stopped_attempt_leaves_what_a_newer_one_swapped_in(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under `replace`, both want to exchange the old folder. The later exchange is undone."""
    path = tmp_path / "out"
    old = claimed(store, path, "old")
    assert end(store, old, published(store, path, old, basis="old"))
    first = claimed(store, path)
    stopped = staged(store, path, first, "replace")
    real = publication.exchange
    newer: list[tuple[Job, Staging]] = []

    def exchange(one: Path, other: Path) -> bool:
        if not newer:  # the first attempt is stopped here, and goes on once the second one has published
            lose(store, first)
            second = again(store)
            newer.append((second, staged(store, path, second, "replace")))
            with monkeypatch.context() as patched:
                patched.setattr(Staging, "_clear", lambda _: None)  # it has not come to that yet
                newer[0][1].publish({}, shards=1)
        return real(one, other)

    monkeypatch.setattr(publication, "exchange", exchange)
    stopped.publish({}, shards=1)
    [(second, theirs)] = newer
    assert stopped.publication == theirs.publication
    assert not end(store, first, stopped)
    assert end(store, second, theirs)
    for _ in Sweep(store, Rules(keep_s=0, keep_failed_s=0), now=LATER * 2, remove=True).steps():
        pass
    assert doubt(store, path) is None


def test_an_output_in_an_object_store_is_known_once_its_job_is_gone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the job did not succeed. While the object store does not answer, the job stays."""
    address = f"s3://{s3.bucket(monkeypatch)}/results/one"
    queued(store, spec={"output": {"path": address}}, name="n", kind="score", now=NOW)
    job = again(store)
    output = OutputSpec(path=address, format="npy")  # type: ignore[arg-type]
    staging = stage(output, job.id, job.attempt, through=once, ledger=store.publications, basis="b")
    staging.write_shard(0, {"top1": np.arange(4)}, last=True)
    staging.publish({}, shards=1)
    store.jobs.cancelled(job.id, 1, NOW)
    with monkeypatch.context() as patched:
        patched.setattr(Manifests, "find", lambda _: (_ for _ in ()).throw(ObjectTrouble("no answer")))
        steps = list(Sweep(store, Rules(keep_s=0, keep_failed_s=0), now=LATER, remove=True).steps())
    assert f"job {job.id} stays: no answer" in [text for step in steps for text in step.trouble]
    assert [each.id for each in store.jobs.list()] == [job.id]
    for _ in Sweep(store, Rules(keep_s=0, keep_failed_s=0), now=LATER, remove=True).steps():
        pass
    assert store.jobs.list() == []
    found = Manifests(Objects(address), store.publications).find()[0]
    assert found is not None
    assert found.doubt is None


def test_looking_at_what_would_be_pruned_records_nothing(store: Store, tmp_path: Path) -> None:
    """A publication is recorded only as its job goes."""
    path = tmp_path / "out"
    job = claimed(store, path)
    published(store, path, job)
    store.jobs.cancelled(job.id, 1, NOW)
    for _ in Sweep(store, Rules(keep_s=0, keep_failed_s=0), now=LATER, remove=False).steps():
        pass
    assert store.expiry.published(above="", limit=9) == []


@pytest.mark.parametrize("if_exists", WAYS)
@pytest.mark.parametrize("how", ["copied", "changed", "forged"])
def test_a_folder_that_the_attempt_did_not_publish(store: Store, tmp_path: Path, how: str, if_exists: str) -> None:
    """Between rename and end, too, a copy, a changed manifest or one by hand is nobody's: the job says so."""
    path = tmp_path / "out"
    first = claimed(store, path)
    published(store, path, first, if_exists)
    if how == "copied":
        path.rename(tmp_path / "real")
        shutil.copytree(tmp_path / "real", path)
    else:
        held = json.loads((path / "manifest.json").read_bytes())
        changes = {"token": "0" * 32} if how == "forged" else {"summary": {"accuracy": 1.0}}
        (path / "manifest.json").write_text(json.dumps(held | changes, indent=1, sort_keys=True))
    lose(store, first)
    second = again(store)
    with pytest.raises(OutputExists):
        staged(store, path, second, if_exists)
    assert doubt(store, path) is not None
    if how == "copied":
        shutil.rmtree(path)
        (tmp_path / "real").rename(path)
        assert end(store, second, published(store, path, second, if_exists))


def test_a_folder_at_another_path(store: Store, tmp_path: Path) -> None:
    """Moved on its device it stays what it is, as with a recorded publication."""
    path = tmp_path / "out"
    published(store, path, claimed(store, path))
    path.rename(tmp_path / "moved")
    assert doubt(store, tmp_path / "moved") is None
