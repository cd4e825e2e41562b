"""Which files are new, where they are found, and how a job's list of them is kept."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sqlalchemy.dialects import postgresql, sqlite

from nimble_jobs.data import arrays, open_reader
from nimble_jobs.data.file_list import NAME, find_list, keep_list
from nimble_jobs.data.listing import list_input
from nimble_jobs.decoding import do
from nimble_jobs.decoding.recipe import Recipe
from nimble_jobs.errors import DataError
from nimble_jobs.seen import CHANGED, VANISHED, Counts, FileList, InputFile, Kind, Scored, Seen, kind_of
from nimble_jobs.spec.model import InputSpec
from nimble_jobs.store import Store, open_store
from nimble_jobs.store import seen as seen_files
from nimble_jobs.store.home import resolve
from nimble_jobs.store.words import FileName
from tests.store_samples import NOW, queued

S = 10**9


def file(path: str = "a", mtime_s: float = 1000, size: int = 5, **values: int) -> InputFile:
    return InputFile(path=path, size=size, mtime_ns=int(mtime_s * S), **values)


def seen_as(file: InputFile, model: str = "m") -> Seen:
    return Seen(root="/in", path=file.path, size=file.size, mtime_ns=file.mtime_ns, model=model, job="j", at=0.0)


@pytest.mark.parametrize(
    ("found", "known", "changed", "model_change", "kind"),
    [
        (file(), None, "rescore", "new", Kind.NEW),
        (file(mtime_s=0), None, "rescore", "new", Kind.NEW),  # late, with an old time
        (file(), file(), "rescore", "new", Kind.SKIPPED),
        (file(size=6), file(), "rescore", "new", Kind.CHANGED),
        (file(mtime_s=999), file(), "rescore", "new", Kind.CHANGED),  # older than it was: another file
        (file(size=6), file(), "ignore", "new", Kind.IGNORED),
        (file(size=6), file(), "fail", "new", Kind.CHANGED),
        (file(), file(), "rescore", "all", Kind.SKIPPED),
        (file(mtime_s=1990), None, "rescore", "new", Kind.SETTLING),
        (file(mtime_s=1990), file(), "ignore", "new", Kind.SETTLING),
        (file(mtime_s=1940), None, "rescore", "new", Kind.NEW),
        (file(mtime_s=1990), file(mtime_s=1990), "rescore", "new", Kind.SKIPPED),  # a settled one was scored
        (file(mtime_s=9e6, ctime_ns=1000 * S), None, "rescore", "new", Kind.NEW),  # from the future, long ago
        (file(mtime_s=9e6, ctime_ns=1990 * S), None, "rescore", "new", Kind.SETTLING),
        (file(size=-1), None, "rescore", "new", Kind.UNUSABLE),
    ],
)
def test_kinds(found: InputFile, known: InputFile | None, changed: str, model_change: str, kind: Kind) -> None:
    """By size, time and age, at second 2000, with a minute to settle."""
    earlier = None if known is None else seen_as(known)
    given = {"model": "m", "settle_s": 60.0, "now": 2000.0}
    assert kind_of(found, earlier, changed=changed, model_change=model_change, **given) is kind


@pytest.mark.parametrize("changed", ["rescore", "ignore", "fail"])
def test_another_model(changed: str) -> None:
    """`all` takes what is seen under another model, changed or not; `new` does not care."""
    for found, kind in ((file(), Kind.SKIPPED), (file(size=6), Kind.IGNORED if changed == "ignore" else Kind.CHANGED)):
        given = {"model": "other", "settle_s": 60.0, "changed": changed, "now": 2000.0}
        assert kind_of(found, seen_as(file()), model_change="new", **given) is kind  # type: ignore[arg-type]
        assert kind_of(found, seen_as(file()), model_change="all", **given).wanted  # type: ignore[arg-type]


def names(source: Path | str, format_: str = "images") -> list[str]:
    return sorted(f.path for f in list_input(InputSpec(source=str(source), format=format_)))  # type: ignore[arg-type]


def test_listing(tmp_path: Path) -> None:
    """Pictures of all folders, through links, each folder once; of other formats those in the folder itself."""
    for name in ("a.png", "sub/b.JPG", "sub/.hidden.png", ".git/c.png", "notes.txt", "x.npy", "sub/y.npy"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(b"123")
    (tmp_path / "in" / "loop").symlink_to(tmp_path / "in")
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "d.png").touch()
    (tmp_path / "in" / "linked").symlink_to(tmp_path / "else")
    (tmp_path / "in" / "folder.png").mkdir()
    assert names(tmp_path / "in") == ["a.png", "linked/d.png", "sub/b.JPG"]
    assert names(tmp_path / "in", "npy") == ["x.npy"]
    assert names(tmp_path / "in" / "*.png") == ["a.png"]
    assert names(tmp_path / "in" / "**" / "*.npy", "npy").count("sub/y.npy") == 1
    assert names(tmp_path / "in" / "x.npy", "npy") == ["x.npy"]
    assert names(tmp_path / "in" / "z*.png") == []
    (listed,) = list_input(InputSpec(source=str(tmp_path / "in"), format="npy"))
    found = (tmp_path / "in" / "x.npy").stat()
    assert (listed.size, listed.mtime_ns, listed.inode) == (3, found.st_mtime_ns, found.st_ino)
    for missing in ("none", "none/*.png", "none.npy"):
        with pytest.raises(DataError, match=r"no such f"):
            names(tmp_path / missing)


def test_what_is_no_file_is_listed_as_such(tmp_path: Path) -> None:
    """A pipe, and a link to nothing, have no size; nobody waits for them."""
    os.mkfifo(tmp_path / "a.npy")
    (tmp_path / "b.npy").symlink_to(tmp_path / "none")
    assert [f.size for f in list_input(InputSpec(source=str(tmp_path), format="npy"))] == [-1, -1]


FILES = FileList(
    root="/in", listed_at=5.5, after_run=3, counts=Counts(listed=2, new=2), files=[file("a"), file("\udcff ü", inode=7)]
)


def test_a_list_is_kept(tmp_path: Path) -> None:
    """With names that are no text, and the first one that was written stays."""
    assert find_list(tmp_path / "out", "j") is None
    assert keep_list(tmp_path / "out", "j", 1, FILES) == FILES
    assert keep_list(tmp_path / "out", "j", 2, replace(FILES, files=[file("other")])) == FILES
    assert find_list(tmp_path / "out", "j") == FILES
    assert [p.name for p in (tmp_path / ".out.j").iterdir()] == [NAME]


@pytest.mark.parametrize("at", [3, 60, -30, -1])
def test_a_damaged_list_is_none(tmp_path: Path, at: int) -> None:
    """It is found out wherever a bit flips or the file ends, and written anew."""
    keep_list(tmp_path / "out", "j", 1, FILES)
    path = tmp_path / ".out.j" / NAME
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[at] ^= 1
    for damaged in (bytes(flipped), whole[:at]):
        path.write_bytes(damaged)
        assert find_list(tmp_path / "out", "j") is None
    assert keep_list(tmp_path / "out", "j", 2, FILES) == FILES
    assert path.read_bytes() == whole


@given(st.text(st.characters(exclude_characters="\0"), max_size=8) | st.text("\\u0dcf8\udcff", max_size=12))
def test_file_names_in_the_database(name: str) -> None:
    """Each name comes back as it was, so no two are the same."""
    column, dialect = FileName(), None
    stored = column.process_bind_param(name, dialect)  # type: ignore[arg-type]
    assert stored is not None
    stored.encode()
    assert column.process_result_value(stored, dialect) == name  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home"))) as opened:
        yield opened


def finish(store: Store, files: Sequence[InputFile], *, after_run: int, attempt: int = 1, now: float = NOW) -> str:
    job = queued(store, spec={}, name="n", kind="score", now=NOW)
    store.jobs.claim("w", device="cpu", now=NOW)
    scored = Scored(root="/in", model="m", listed_at=now, after_run=after_run, files=files)
    store.jobs.finish(job.id, attempt, outputs={}, timings={}, schedule={}, scored=scored, now=now)
    return job.id


def known(store: Store) -> dict[str, tuple[str, int]]:
    return {seen.path: (seen.job, seen.mtime_ns // S) for seen in store.seen.files("n")}


def test_marks_of_a_clock_that_was_set_back(store: Store) -> None:
    """The newest run counts, whatever the clock said."""
    finish(store, [file()], after_run=0, now=NOW)
    job = finish(store, [file(mtime_s=5)], after_run=store.seen.newest_run("n", "/in"), now=NOW - 86400)
    assert known(store) == {"a": (job, 5)}


def test_two_that_could_not_see_each_other(store: Store) -> None:
    """As on two machines: both have scored a file, the later state of it is seen, and the second one says so."""
    first = finish(store, [file("a"), file("b", 1000)], after_run=0)
    second = finish(store, [file("a", 900), file("b", 1001), file("c")], after_run=0)
    assert known(store) == {"a": (first, 1000), "b": (second, 1001), "c": (second, 1000)}
    (event,) = [e for e in store.jobs.events(second) if e.kind == "overlap"]
    assert event.message.startswith("2 files were also scored by another job of this name")


def test_a_stale_attempt_marks_nothing(store: Store) -> None:
    """Files are seen with the success of the job, or not at all."""
    finish(store, [file()], after_run=0, attempt=2)
    assert known(store) == {}
    assert store.seen.sources() == []


def test_many_files_in_pages(store: Store) -> None:
    """More than fit into one statement: all are compared, listed and forgotten."""
    files = [file(f"{i:05}") for i in range(1201)]
    finish(store, files, after_run=0)
    compared = list(store.seen.compare("n", "/in", [*files, file("new")]))
    assert [found is not None for _, found in compared] == [True] * 1201 + [False]
    assert all(found is None for _, found in store.seen.compare("n", "/else", files))
    assert list(known(store)) == [f.path for f in files]
    assert store.seen.forget("n", now=NOW, which=lambda seen: seen.path.endswith("7")) == 120
    assert len(known(store)) == 1081
    assert store.seen.forget("n", now=NOW) == 1081
    assert store.seen.sources() == []
    assert [e.message for e in store.jobs.events() if e.kind == "forgotten"][-1] == "1,081 seen files of n forgotten"


def listed(folder: Path, format_: str) -> tuple[InputSpec, FileList]:
    spec = InputSpec(source=str(folder), format=format_)  # type: ignore[arg-type]
    files = sorted(list_input(spec), key=lambda f: f.path)
    counts = Counts(listed=len(files), new=len(files))
    return spec, FileList(root=str(folder), listed_at=NOW, after_run=0, counts=counts, files=files)


def test_a_picture_that_is_written_to_while_it_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a bad record, whatever was read of it, as is one that cannot be decoded; the others keep their places."""
    for i in range(4):
        Image.fromarray(np.full((2, 2, 3), i, dtype=np.uint8)).save(tmp_path / f"{i}.png")
    (tmp_path / "1.png").write_bytes(b"?")
    spec, files = listed(tmp_path, "images")
    decoded = do.pixels

    def decode(opened: BinaryIO, recipe: Recipe) -> np.ndarray:
        pixels = decoded(opened, recipe)
        if pixels[0, 0, 0] == 2:
            os.utime(tmp_path / "2.png", (1.0, 1.0))
        return pixels

    with open_reader(spec, files=files) as reader:
        monkeypatch.setattr(do, "pixels", decode)
        batch = reader.take(np.arange(4))
        assert batch.ids == ["0.png", "3.png"]
        assert (batch.x[:, 0, 0, 0] * 255).round().tolist() == [0, 3]
        assert [(b.id, b.reason.partition(":")[0]) for b in batch.bad] == [
            ("1.png", "cannot be decoded"),
            ("2.png", CHANGED),
        ]


def test_an_array_that_is_written_to_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bad record takes the place of its records; ids name the file, and shards of others cannot be mixed up."""
    for name, rows in (("a", 2), ("b", 3), ("c", 1)):
        np.save(tmp_path / f"{name}.npy", np.full((rows, 2), rows, dtype=np.float32))
    spec, files = listed(tmp_path, "npy")
    with open_reader(spec, files=files) as reader:
        whole = reader.fingerprint
        assert (reader.total, reader.left_out) == (6, {})
    opened = arrays.open_arrays

    def open_one(spec: InputSpec, path: Path) -> arrays.ArraySource:
        source = opened(spec, path)
        if path.name == "b.npy":
            np.save(path, np.zeros((9, 2), dtype=np.float32))
        return source

    monkeypatch.setattr(arrays, "open_arrays", open_one)
    with open_reader(spec, files=files) as reader:
        assert (reader.total, reader.left_out) == (4, {"b.npy": CHANGED})
        assert reader.fingerprint != whole
        batch = reader.take(np.arange(4))
        assert batch.ids == ["a.npy:0", "a.npy:1", "c.npy:0"]
        assert [(b.id, b.reason) for b in batch.bad] == [("b.npy", CHANGED)]
        assert batch.x[:, 0].tolist() == [2, 2, 1]
    for path in tmp_path.iterdir():
        path.unlink()
    with pytest.raises(DataError, match=rf"none of 3 new files can be read; the first, a.npy: {VANISHED}"):
        open_reader(spec, files=files)


def test_the_statement_of_either_database() -> None:
    """Rows take the place of older ones by one statement, in SQLite and in PostgreSQL."""
    for dialect in (sqlite.dialect(), postgresql.dialect()):
        session: Any = SimpleNamespace(get_bind=lambda d=dialect: SimpleNamespace(dialect=d))
        text = str(seen_files._UPSERT.of(session).compile(dialect=dialect))  # type: ignore[attr-defined]
        assert "ON CONFLICT (source, path) DO UPDATE SET size = excluded.size" in text
