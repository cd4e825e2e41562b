"""Names, stamps and ids of many records, kept compactly: they say what a plain list would say."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nimble_jobs.data import ids as ids_module
from nimble_jobs.data import looking
from nimble_jobs.data.ids import Ids, JoinedIds, Numbered, check_ids
from nimble_jobs.data.listing import list_images, list_input
from nimble_jobs.data.stamps import Names, Stamp, Stamps, fingerprint
from nimble_jobs.data.table import column_ids
from nimble_jobs.errors import DataError
from nimble_jobs.seen import CHANGED, VANISHED, InputFile
from nimble_jobs.spec.model import InputSpec

file_names = st.binary(min_size=1, max_size=9).filter(lambda b: not set(b) & {0, 47}).map(os.fsdecode)


@given(names=st.lists(file_names, max_size=20), data=st.data())
def test_names_are_those_that_were_given(names: list[str], data: st.DataObject) -> None:
    """Any bytes that a file name may have survive; positions, slices and picks agree with a list."""
    kept = Names(names)
    assert list(kept) == names
    assert kept == names
    a, b = data.draw(st.integers(-3, 22)), data.draw(st.integers(-3, 22))
    step = data.draw(st.sampled_from([None, 1, 2, -1]))
    assert kept[a:b:step] == names[a:b:step]
    picks = data.draw(st.lists(st.integers(0, len(names) - 1), max_size=9)) if names else []
    assert kept.take(np.array(picks, dtype=np.int64)) == [names[i] for i in picks]


@pytest.mark.parametrize("way", ["alone", "threads", "processes", "processes that fail", "no processes"])
def test_stamps_say_what_each_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """As one by one, whoever looks; links to nothing and pipes have size -1, and any bytes are a name."""
    monkeypatch.setattr(looking, "_FIRST", 2)
    if way == "threads":
        monkeypatch.setattr(looking, "_SLOW_S", -1.0)
        monkeypatch.setattr(looking, "_STEP", 3)
    elif way != "alone":
        monkeypatch.setattr(looking, "_PIECE", 4)
        monkeypatch.setattr(looking, "usable_cores", lambda: 3)
    here = list[int]()
    look = looking.look
    monkeypatch.setattr(looking, "look", lambda before, names: here.append(len(names)) or look(before, names))
    if way == "processes that fail":
        monkeypatch.setattr(sys, "executable", "/bin/false")
    elif way == "no processes":
        monkeypatch.setattr(sys, "executable", "/there/is/none")
    names = [f"{i % 3}/{i}.png" for i in range(9)] + ["0/" + os.fsdecode(b"\xff%s\n.png")]
    for folder in "012":
        (tmp_path / folder).mkdir()
    for i, name in enumerate(names):
        (tmp_path / name).write_bytes(bytes(i))
    (tmp_path / names[4]).unlink()
    (tmp_path / names[4]).symlink_to("nowhere")
    (tmp_path / names[5]).unlink()
    os.mkfifo(tmp_path / names[5])
    stamps = Stamps.of(tmp_path, Names(names))
    none = [Stamp(path=str(tmp_path / names[i]), size=-1, mtime_ns=0, inode=0) for i in (4, 5)]
    plain = [Stamp.of(tmp_path / n) if i not in (4, 5) else none[i - 4] for i, n in enumerate(names)]
    assert list(stamps) == plain
    assert sorted(here) == {"alone": [2, 8], "threads": [2, 2, 3, 3], "processes": [2]}.get(way, [2, 4, 4])
    assert fingerprint(stamps) == fingerprint(plain)
    assert stamps.folders().tolist() == ["0", "1", "2", "0", "1", "2", "0", "1", "2", "0"]


def test_files_that_moved_are_named(tmp_path: Path) -> None:
    """Written to, replaced by something else, or gone: everything else is as it was."""
    for name in "abcd":
        (tmp_path / name).write_text(name)
    names = Names("abcd")
    then = Stamps.of(tmp_path, names)
    assert then.moved() == {}
    (tmp_path / "b").write_text("bb")
    (tmp_path / "c").unlink()
    (tmp_path / "d").unlink()
    (tmp_path / "d").mkdir()
    assert then.moved() == {"b": CHANGED, "c": VANISHED, "d": VANISHED}


def test_a_fingerprint_is_the_same_however_stamps_are_kept(tmp_path: Path) -> None:
    """One line a file: shards that an earlier version wrote are still taken over."""
    files = [InputFile(path=f"{i}.png", size=i, mtime_ns=i << 40, inode=(1 << 64) - 1 - i) for i in range(5)]
    stamps = Stamps.listed(tmp_path, files)
    lines = "".join(f"{tmp_path}/{f.path}\0{f.size}\0{f.mtime_ns}\0{f.inode}\n" for f in files)
    assert fingerprint(stamps) == fingerprint(list(stamps)) == hashlib.sha256(lines.encode()).hexdigest()


def test_images_are_listed_in_the_order_of_their_paths(tmp_path: Path) -> None:
    """Folders are followed through links once, hidden ones and other files are left out, and paths are sorted whole."""
    for name in ("a/1.png", "a-b/2.PNG", "a/z/3.jpg", ".h/4.png", "a/.5.png", "a/6.txt", "7.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "b").symlink_to("a", target_is_directory=True)
    (tmp_path / "c.png").mkdir()
    root, names, others = list_images(str(tmp_path), (".png", ".jpg"))
    assert (root, names, others) == (tmp_path, ["7.png", "a-b/2.PNG", "a/1.png", "a/z/3.jpg"], 1)
    assert list_images(f"{tmp_path}/*/*.png", (".png", ".jpg"))[1] == ["a/1.png", "b/1.png"]
    odd = [f"{tmp_path}//a/*.png", f"{tmp_path}/a-b/../[a]/**", f"{tmp_path}/a/**/*.*g"]
    expected = ["1.png"], ["a/1.png", "a/z/3.jpg"], ["1.png", "z/3.jpg"]
    assert tuple(list_images(pattern, (".png", ".jpg"))[1] for pattern in odd) == expected
    for pattern in odd:
        listed = list_input(InputSpec(source=pattern, format="images"))
        assert sorted(file.path for file in listed) == list_images(pattern, (".png", ".jpg"))[1]
    assert {f.path for f in list_input(InputSpec(source=str(tmp_path), format="images"))} == set(names)


@pytest.mark.parametrize("kind", ["list", "text", "bytes", "numbers", "arrow", "chunks", "joined"])
def test_ids_are_text_however_they_are_kept(kind: str) -> None:
    """Every way to keep ids gives the same text, and finds the first id that two records share."""

    def kept(texts: list[str]) -> Ids:
        column = pa.chunked_array([texts[:4], [], texts[4:]], type=pa.string())
        return {
            "list": lambda: Ids(texts),
            "text": lambda: Ids(np.array(texts)),
            "bytes": lambda: Ids(np.array([t.encode() for t in texts])),
            "numbers": lambda: Ids(np.array([int(t) for t in texts], dtype=np.uint64)),
            "arrow": lambda: column_ids(pa.chunked_array([texts]), "d", None),
            "chunks": lambda: column_ids(column, "d", None),
            "joined": lambda: JoinedIds([Ids(texts[:2]), Ids([]), Ids(np.array([int(t) for t in texts[2:]]))]),
        }[kind]()

    texts = [str(i * 37 % 101) for i in range(9)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ids_module, "STEP", 4)
        check_ids(kept(texts), "d", None)
        found = kept(texts)
        assert list(found) == texts
        assert found[-1] == texts[-1]
        assert found[2:7] == texts[2:7]
        assert found.take(np.array([8, 0, 3])) == [texts[8], texts[0], texts[3]]
        assert found.take(np.array([3, 4, 5])) == texts[3:6]
        texts[7] = texts[8] = texts[1]
        with pytest.raises(DataError, match=rf"d: id '{texts[1]}' at records 1 and 7 \(line 1 and line 7\)"):
            check_ids(kept(texts), "d", lambda i: f"line {i}")


def test_ids_with_one_hash_are_not_taken_for_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal hashes only say where to look."""
    monkeypatch.setattr(Ids, "keys", lambda _self, first, last: np.zeros(last - first, dtype=np.int64))
    check_ids(Ids(["a", "b", "c"]), "d", None)
    with pytest.raises(DataError, match="id 'b' at records 1 and 3;"):
        check_ids(Ids(["a", "b", "c", "b"]), "d", None)


def test_numbered_ids() -> None:
    """Records without ids of their own are named by their file and number."""
    ids = JoinedIds([Numbered("a.npy", 2), Ids(["b.npy"]), Numbered("c.npy", 1)])
    assert list(ids) == ["a.npy:0", "a.npy:1", "b.npy", "c.npy:0"]
    assert ids[1:3] == ["a.npy:1", "b.npy"]
