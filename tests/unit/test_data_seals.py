"""Seals: only an attempt that has its secret makes a token, and nobody can use that for another manifest."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_jobs.data.seals import known, sealed
from nimble_jobs.job import Publication
from tests.ledger import Book

CONTENTS = {"job_id": "j", "attempt": 1, "folder": "5:7", "summary": {"token": "", "zeros": "0" * 32, "nan": 1e-7}}
VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=5)


class Asked(Book):
    """Fails if it is asked for what no database can be asked for."""

    def find(self, token: str) -> Publication | None:
        assert len(token) == 32
        assert int(token, 16) >= 0
        return super().find(token)

    def sealer(self, job_id: str, attempt: int) -> Any:
        assert job_id.encode("ascii").find(b"\0") < 0
        assert 0 < attempt < 2**31
        return super().sealer(job_id, attempt)


@pytest.fixture
def ledger(tmp_path: Path) -> Book:
    return Asked(tmp_path / "w").claim("j", 1, tmp_path / "out").claim("j", 2, "s3://bucket/out/")


def test_a_sealed_manifest_is_known(ledger: Book, tmp_path: Path) -> None:
    """As the publication that the end of the job is to record."""
    contents, raw = sealed(CONTENTS, ledger.key("j", 1))
    assert json.loads(raw) == contents == {**CONTENTS, "token": contents["token"]}
    assert known(contents, raw, ledger) == Publication(
        token=contents["token"],
        job_id="j",
        path=str(tmp_path / "out"),
        folder="5:7",
        manifest_sha256=hashlib.sha256(raw).hexdigest(),
    )
    contents, raw = sealed({**CONTENTS, "attempt": 2}, ledger.key("j", 2))
    publication = known(contents, raw, ledger)
    assert publication is not None
    assert publication.path == "s3://bucket/out"


def test_what_is_recorded_comes_first(ledger: Book) -> None:
    """Also if the secret has gone with the job."""
    contents, raw = sealed(CONTENTS, ledger.key("j", 1))
    recorded = Publication(token=contents["token"], job_id="j", path="/p", folder="1:1", manifest_sha256="0" * 64)
    ledger.record(recorded)
    (ledger.home / "j-1").unlink()
    assert known(contents, raw, ledger) == recorded


def test_any_other_byte_breaks_the_seal(ledger: Book) -> None:
    """Each byte of the manifest is sealed."""
    contents, raw = sealed(CONTENTS, ledger.key("j", 1))
    for at in range(len(raw)):
        forged = bytearray(raw)
        forged[at] ^= 1
        try:
            said = json.loads(bytes(forged))
        except ValueError:
            continue
        assert known(said, bytes(forged), ledger) is None, at
    assert known(contents, raw + b"\n", ledger) is None


def test_a_token_in_another_place_is_none(ledger: Book) -> None:
    """The bytes of a sealed manifest, hidden in one that says something else, seal nothing."""
    contents, raw = sealed(CONTENTS, ledger.key("j", 1))
    line = b'\n "token": "%s"' % contents["token"].encode()
    for forged in (raw.replace(line, line + b"," + line), raw.replace(b'"attempt": 1', b'"attempt":' + line[9:])):
        assert known({**contents, "job_id": "j"}, forged, ledger) is None


@pytest.mark.parametrize(
    "change",
    [
        {"job_id": "k"},
        {"attempt": 2},
        {"attempt": 3},
        {"folder": "5:8"},
        {"summary": {}},
    ],
)
def test_a_seal_for_another_attempt_or_folder(ledger: Book, change: dict[str, Any]) -> None:
    """What is changed needs another seal, which takes the secret."""
    contents, _ = sealed(CONTENTS, ledger.key("j", 1))
    forged = {**contents, **change}
    raw = json.dumps(forged, indent=1, sort_keys=True).encode()
    assert known(forged, raw, ledger) is None


@pytest.mark.parametrize("field", ["token", "job_id", "attempt", "folder"])
@pytest.mark.parametrize(
    "value", [None, 1.5, [], {}, "", "\ud800", "j\0", "é", "0" * 32, "F" * 32, -1, 0, 2**31, 10**30, True]
)
def test_odd_values(ledger: Book, field: str, value: Any) -> None:
    """A forged manifest may hold anything. It is unknown, and no database is asked for what it cannot hold."""
    contents, raw = sealed(CONTENTS, ledger.key("j", 1))
    assert known({**contents, field: value}, raw.replace(b'"5:7"', b'"5:9"'), ledger) is None


@given(st.dictionaries(st.text() | st.just("token"), VALUES, max_size=4))
def test_any_summary_can_be_sealed(tmp_path_factory: pytest.TempPathFactory, summary: dict[str, Any]) -> None:
    """Whatever it says, also line breaks and tokens of its own."""
    ledger = Book(tmp_path_factory.mktemp("w") / "b").claim("j", 1, "/out")
    contents, raw = sealed({**CONTENTS, "summary": {"a": summary, "b": '\n "token": ""'}}, ledger.key("j", 1))
    assert known(json.loads(raw), raw, ledger) is not None
    assert json.loads(raw)["token"] == contents["token"]
