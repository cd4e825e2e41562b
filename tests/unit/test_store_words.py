"""Text that reaches the database is valid Unicode, has no NUL, and is not too long."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import DATABASE, resolve
from nimble_jobs.store.words import LIMIT_BYTES, plain, words
from tests.store_samples import queued

ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=[]), max_size=60)  # surrogates and NULs as well
LONG_TEXT = st.builds(lambda text, times: text * times, ANY_TEXT, st.integers(1, 3000))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path_factory.mktemp("home")))) as opened:
        yield opened


@given(ANY_TEXT | LONG_TEXT)
def test_words(text: str) -> None:
    """The result encodes, is bounded, stays as it is the second time, and is the text itself where that was fine."""
    found = words(text)
    data = found.encode()
    assert len(data) <= LIMIT_BYTES
    assert b"\0" not in data
    assert words(found) == found
    sound = "\0" not in text and not any("\ud800" <= c <= "\udfff" for c in text)
    if sound and len(text.encode()) <= LIMIT_BYTES:
        assert found == text


def test_what_is_cut_off_is_said() -> None:
    """The beginning is kept; the end says how many bytes are missing and where they are."""
    found = words("ä" * 20_000)
    head, _, note = found.partition(" … (")
    assert set(head) == {"ä"}
    missing = int(note.partition(" ")[0])
    assert abs(missing + len(head.encode()) - 40_000) <= 1  # half a letter is not kept
    assert "nimble-jobs logs" in note


@given(st.recursive(ANY_TEXT | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(ANY_TEXT, inner)))
def test_plain(value: object) -> None:
    """All texts of a JSON value are made sound, keys included; everything else stays."""
    json.dumps(plain(value), ensure_ascii=False).encode()
    assert plain(plain(value)) == plain(value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(text=ANY_TEXT | LONG_TEXT)
def test_any_text_can_be_stored(store: Store, text: str) -> None:
    """Names, errors, events and their data, phases of a schedule: whatever they say, every row can be read."""
    job = queued(store, spec={}, name=f"n{text}", kind="score", now=1.0, max_attempts=9)
    claimed = store.jobs.claim(f"w{text}", device="cpu", now=2.0)
    assert claimed is not None
    assert claimed.id == job.id
    assert store.jobs.progress(job.id, 1, done=0, total=None, bad=0, schedule={"fallback": text}, timings={text: 1})
    assert store.jobs.event("note", text, job.id, 1, {text: [text]}, now=2.0)
    assert store.jobs.fail(job.id, 1, error=text, retry=False, lost=False, now=3.0)
    ended = store.jobs.get(job.id)
    assert ended.error == words(text)
    assert ended.schedule == {"fallback": words(text)}
    with closing(sqlite3.connect(store.home / DATABASE)) as connection:
        connection.text_factory = bytes
        for table in ("jobs", "attempts", "events"):
            for row in connection.execute(f"SELECT * FROM {table}"):
                for value in row:
                    if isinstance(value, bytes):
                        value.decode("utf-8")
                        assert b"\0" not in value
