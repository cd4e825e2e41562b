"""The listing that the member that claimed a job leaves for the others: whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from nimble_jobs.data import looking, open_reader
from nimble_jobs.data.shared_listing import LISTING, from_bytes, read_listing, to_bytes
from nimble_jobs.data.stamps import Names, Stamps, fingerprint
from nimble_jobs.errors import DataError
from nimble_jobs.spec.model import InputSpec

file_names = st.binary(min_size=1, max_size=9).filter(lambda b: not set(b) & {0, 47}).map(os.fsdecode)
whole = st.integers(-(1 << 63), (1 << 63) - 1)


@given(files=st.lists(st.tuples(file_names, whole, whole, whole), max_size=9))
def test_what_is_read_is_what_was_written(files: list[tuple[str, int, int, int]]) -> None:
    facts = np.array([fact for _, *fact in files], dtype=np.int64).reshape(-1, 3)
    stamps = Stamps(Path("/some/folder"), Names(name for name, *_ in files), facts)
    found = from_bytes(to_bytes(stamps))
    assert list(found.names) == [name for name, *_ in files]
    assert list(found) == list(stamps)
    assert fingerprint(found) == fingerprint(stamps)


def test_a_damaged_one_counts_as_none(tmp_path: Path) -> None:
    """Cut, or with any byte changed; also one that another version wrote, and a folder in its place."""
    assert read_listing(tmp_path) is None
    data = to_bytes(Stamps(tmp_path, Names(["a.png", "b.png"]), np.arange(6, dtype=np.int64).reshape(2, 3)))
    at = tmp_path / LISTING
    at.write_bytes(data)
    assert read_listing(tmp_path) is not None
    for size in range(len(data)):
        at.write_bytes(data[:size])
        assert read_listing(tmp_path) is None, size
    body = data.index(b"\n") + 1
    for place in range(body, len(data)):
        at.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert read_listing(tmp_path) is None, place
    for head in (b"[]", b"{}", b"1", b'{"version": 2}', data[: body - 1].replace(b'"files": 2', b'"files": 3')):
        at.write_bytes(head + data[body - 1 :])
        assert read_listing(tmp_path) is None, head
    at.unlink()
    at.mkdir()
    assert read_listing(tmp_path) is None


def test_a_reader_looks_at_no_file_of_a_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the records, ids and fingerprint of the one that made the listing; a file that has changed is an error."""
    for name in "cab":
        Image.new("RGB", (4, 4)).save(tmp_path / f"{name}.png")
    spec = InputSpec.model_validate({"source": str(tmp_path), "format": "images"})
    with open_reader(spec) as first:
        listing = first.listing
        assert listing is not None
        (tmp_path / "0.png").write_bytes(b"came later")
        monkeypatch.setattr(looking, "look", None)
        with open_reader(spec, listing=from_bytes(to_bytes(listing))) as second:
            assert second.fingerprint == first.fingerprint
            assert second.ids(np.arange(3)) == ["a.png", "b.png", "c.png"]
            assert np.array_equal(second.take(np.arange(3)).x, first.take(np.arange(3)).x)
            Image.new("RGB", (4, 4), "red").save(tmp_path / "b.png")
            with pytest.raises(DataError, match=r"b\.png: changed while it was read"):
                second.take(np.arange(3))


def test_other_inputs_have_none(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((3, 2), np.float32))
    with open_reader(InputSpec.model_validate({"source": str(tmp_path / "x.npy"), "format": "npy"})) as reader:
        assert reader.listing is None
