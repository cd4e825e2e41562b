"""What is believed of objects that anybody may have written: nothing that does not have the form of ours."""

from __future__ import annotations

from typing import Any

import pytest

from nimble_jobs.data.object_runs import manifest_of, named_in, notes
from nimble_jobs.errors import NotFound


class Bucket:
    """Objects in memory."""

    def __init__(self, **held: bytes) -> None:
        self.held = held

    def read(self, name: str) -> bytes:
        if name not in self.held:
            raise NotFound(name)
        return self.held[name]


@pytest.mark.parametrize("found", [b"[" * 100_000, b"{", b"\xff", b"[]", b"null", b'{"files": 1, "job_id": "j"}', None])
def test_what_is_not_ours(found: bytes | None) -> None:
    """A manifest names no files, and a note says nothing, however it is broken."""
    bucket: Any = Bucket(**({} if found is None else {"manifest.json": found, "j-1-00000000/.note": found}))
    assert named_in(manifest_of(bucket)) == set()
    assert list(notes(bucket, {"j-1-00000000/.note": 1})) == []


def test_what_is_ours() -> None:
    """The newest note comes first; the sign that an attempt has begun is none."""
    bucket: Any = Bucket(
        **{
            "manifest.json": b'{"files": [{"name": "a"}], "job_id": "j"}',
            "j-1-00000000/.note": b'{"basis": "b", "value": 1}',
            "j-2-00000000/.note": b'{"basis": "b", "value": 2}',
            "j-3-00000000/.note": b"{}",
        }
    )
    assert named_in(manifest_of(bucket)) == {"a"}
    runs = {f"j-{number}-00000000/.note": number for number in (1, 2, 3)}
    assert [note.value for note in notes(bucket, runs)] == [2, 1]
