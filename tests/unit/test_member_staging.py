"""What the member that claimed a job leaves for the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from nimble_jobs.data import MemberStaging, Staging
from nimble_jobs.errors import OutOfStep
from nimble_jobs.spec.model import OutputSpec
from tests.ledger import Book


def member(output: OutputSpec, basis: str = "basis") -> MemberStaging:
    return MemberStaging(output, "j", 1, "w", finish=lambda shard, digest: None, basis=basis)


@pytest.fixture
def output(tmp_path: Path) -> OutputSpec:
    return OutputSpec(path=tmp_path / "out", fields=("id",))


def leading(output: OutputSpec) -> Staging:
    return Staging(output, "j", 1, ledger=Book(output.path.parent), basis="basis")


def test_a_note(output: OutputSpec) -> None:
    """Members find what was noted, also if nothing was."""
    leader = leading(output)
    leader.note({"buckets": [8, 16]})
    assert member(output).noted() == {"buckets": [8, 16]}
    leader.note(None)
    assert member(output).noted() is None


def test_another_input(output: OutputSpec) -> None:
    """A member that reads another input takes no part: its shards would not fit to the others."""
    leading(output).note(None)
    with pytest.raises(OutOfStep, match="has changed since the job's other devices began") as found:
        member(output, "other").noted()
    assert found.value.retryable


def test_a_job_that_is_over(output: OutputSpec) -> None:
    """Its files may be gone before the member begins."""
    leader = leading(output)
    leader.note(None)
    leader.discard()
    with pytest.raises(OutOfStep, match="files of the job's other devices are gone"):
        member(output).noted()
