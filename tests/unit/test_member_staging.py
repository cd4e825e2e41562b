"""What the member that claimed a job leaves for the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from nimble_jobs.data import MemberStaging, Staging, listing_for_member
from nimble_jobs.data.records import NotFinite, ShardCounts
from nimble_jobs.data.stamps import Names, Stamps
from nimble_jobs.errors import FencedOut, OutOfStep
from nimble_jobs.spec.model import OutputSpec
from tests.ledger import Book


def member(output: OutputSpec, basis: str = "basis") -> MemberStaging:
    return MemberStaging(output, "j", 1, "w", finish=lambda shard: None, basis=basis)


@pytest.fixture
def output(tmp_path: Path) -> OutputSpec:
    return OutputSpec(path=tmp_path / "out", fields=("id",))


def leading(output: OutputSpec) -> Staging:
    return Staging(output, "j", 1, ledger=Book(output.folder.parent).claim("j", 1, output.folder), basis="basis")


def test_a_note(output: OutputSpec) -> None:
    """Members find what was noted, also if nothing was."""
    leader = leading(output)
    leader.note({"buckets": [8, 16]})
    assert member(output).noted() == {"buckets": [8, 16]}
    leader.note(None)
    assert member(output).noted() is None


def test_a_listing(output: OutputSpec) -> None:
    """Members of the same attempt find the pictures that were listed; nothing of it is left in the end."""
    leader = leading(output)
    assert listing_for_member(output, "j", 1) is None
    (picture := output.folder.parent / "a.png").write_bytes(b"1")
    stamps = Stamps.of(output.folder.parent, Names(["a.png"]))
    leader.share(stamps)
    found = listing_for_member(output, "j", 1)
    assert found is not None
    assert list(found) == list(stamps)
    assert listing_for_member(output, "j", 2) is None
    picture.write_bytes(b"12")  # or it is another file here
    assert listing_for_member(output, "j", 1) is None
    leader.write_shard(0, {"id": ["a.png"]})
    leader.publish({}, shards=1)
    assert [path.name for path in output.folder.parent.glob(".*")] == []
    stored = output.model_copy(update={"path": "s3://bucket/out"})
    assert listing_for_member(stored, "j", 1) is None


def test_another_input(output: OutputSpec) -> None:
    """A member that reads another input takes no part: its shards would not fit to the others."""
    leading(output).note(None)
    with pytest.raises(OutOfStep, match="has changed since the job's other devices began") as found:
        member(output, "other").noted()
    assert found.value.retryable


def test_a_leader_that_was_stopped(output: OutputSpec) -> None:
    """Another member took the lead while it was stopped. Whatever it does when it goes on, the other one publishes what
    it has checked, and leaves nothing behind.
    """
    book = Book(output.path.parent)
    scores = {"id": ["a", "b"]}
    first = leading(output)
    second = member(output)
    second.write_shard(0, scores)
    leads = Staging(output, "j", 1, ledger=book, basis="basis", successor="w")
    for staging in (first, leads):
        staging.adopt(last=True)
        assert list(staging.done) == [0]
    (extra := leads.file("extra.txt")).write_text("of the one that leads")
    first._complete({})  # everything up to the rename; it removes what it does not know
    first.write_shard(0, {"id": ["other"]})
    assert extra.exists()
    published = leads.publish({}, shards=1)
    assert set(published["files"]) == {"part-00000.parquet", "extra.txt", "manifest.json"}
    with pytest.raises(FencedOut):
        first.write_shard(0, scores)
    assert [path.name for path in output.path.parent.iterdir()] == ["out"]


def test_what_members_found_is_added_up(output: OutputSpec) -> None:
    """Records whose outputs are not finite are those of all members' shards; the first one is that of the input."""
    one, other = (MemberStaging(output, "j", 1, name, finish=lambda shard: None, basis="basis") for name in ("v", "w"))
    leader = leading(output)
    other.write_shard(1, {"id": ["c"]}, counts=ShardCounts(not_finite={"y": NotFinite(records=2, first="c")}))
    one.write_shard(0, {"id": ["a"]}, counts=ShardCounts(not_finite={"y": NotFinite(records=1, first="a")}))
    leader.adopt(last=True)
    published = leader.publish({}, shards=2)
    assert published["not_finite"] == {"y": {"records": 3, "first": "a"}}


def test_a_job_that_is_over(output: OutputSpec) -> None:
    """Its files may be gone before the member begins."""
    leader = leading(output)
    leader.note(None)
    leader.discard()
    with pytest.raises(OutOfStep, match="files of the job's other devices are gone"):
        member(output).noted()
