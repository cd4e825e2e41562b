"""Publication: whole or not at all, once, whatever dies in between."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nimble_jobs.data import BadRecord, Staging, check_writable, files, publish
from nimble_jobs.data.hidden import discard_staging
from nimble_jobs.errors import DataError, FencedOut, ModelError, OutputExists
from nimble_jobs.spec.model import OutputSpec
from tests import prefork
from tests.ledger import Book, staged
from tests.waiting import PATIENCE_S

SHARDS = 3


def output(path: Path, if_exists: str = "fail", format_: str = "jsonl") -> OutputSpec:
    return OutputSpec(path=path, format=format_, if_exists=if_exists)  # type: ignore[arg-type]


def columns(index: int, salt: int = 0) -> dict[str, np.ndarray | list[str]]:
    return {"id": [f"r{index}-{i}" for i in range(3)], "top1": np.arange(3) * (index + 1) + salt}


def write(staging: Staging, upto: int = SHARDS, salt: int = 0) -> None:
    for index in range(upto):
        if index not in staging.done:
            bad = [BadRecord(index=index, id=str(index), reason="r")]
            staging.write_shard(index, columns(index, salt), bad, last=index == SHARDS - 1)


def attempt(
    path: Path,
    number: int,
    if_exists: str = "fail",
    job: str = "job",
    basis: str = "b",
    salt: int = 0,
    *,
    recorded: bool = False,
) -> dict[str, Any]:
    """One whole attempt, as a workload makes it. Its end is only `recorded` if so said, so seals must do for others."""
    staging = staged(output(path, if_exists), job, number, basis=basis)
    if staging.finished is None:
        write(staging, salt=salt)
    outputs = staging.publish({"salt": salt}, shards=SHARDS)
    if recorded:
        assert staging.publication is not None
        Book(path.parent).record(staging.publication)
    return outputs


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but the manifest, which names the attempt."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "manifest.json"}


@pytest.fixture
def undisturbed(tmp_path: Path) -> dict[str, bytes]:
    attempt(tmp_path / "undisturbed" / "out", 1)
    return contents(tmp_path / "undisturbed" / "out")


def leftovers(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if p.name.startswith(".")]


def test_finished_shards_of_an_earlier_attempt_are_taken_over(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    """The second attempt finds what the first one finished, and writes only the rest."""
    path = tmp_path / "w" / "out"
    write(staged(output(path), "job", 1, basis="b"), upto=3)
    second = staged(output(path), "job", 2, basis="b")
    assert sorted(second.done) == [0, 1, 2]
    assert [b.index for b in second.bad] == [0, 1, 2]
    write(second)
    second.publish({})
    assert contents(path) == undisturbed
    assert leftovers(path.parent) == []


@pytest.mark.parametrize("how", ["flip", "cut", "remove", "sheet", "sheet-cut"])
def test_a_damaged_shard_is_written_again(how: str, tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    """A shard whose bytes or sheet are not what was written is not taken over."""
    path = tmp_path / "w" / "out"
    write(staged(output(path), "job", 1, basis="b"), upto=3)
    root = tmp_path / "w" / ".out.job"
    victim = root / ("shards-1/00001.json" if how.startswith("sheet") else "attempt-1/part-00001.jsonl")
    data = bytearray(victim.read_bytes())
    if how == "remove":
        victim.unlink()
    else:
        data[len(data) // 2] ^= 1
        victim.write_bytes(data[:-9] if how.endswith("cut") else data)
    second = staged(output(path), "job", 2, basis="b")
    assert sorted(second.done) == [0, 2]
    write(second)
    second.publish({})
    assert contents(path) == undisturbed


def test_shards_of_another_basis_are_not_taken_over(tmp_path: Path) -> None:
    """When the input or the weights changed between two attempts, nothing of the first one is used."""
    write(staged(output(tmp_path / "out"), "job", 1, basis="old weights"))
    assert staged(output(tmp_path / "out"), "job", 2, basis="new weights").done == {}


def test_shards_of_another_form_are_not_published_together(tmp_path: Path) -> None:
    """Whoever made them: an earlier attempt, or another device. Shards without records have no form."""
    staging = staged(output(tmp_path / "out", format_="npy"), "job", 1, basis="b")
    texts = ["a", "longer"]
    for index, values in enumerate([np.zeros((2, 3)), None, np.ones((2, 3)), np.zeros((2, 3), np.float32)]):
        staging.write_shard(index, {} if values is None else {"name": [texts[index % 2]] * 2, "z": values})
    with pytest.raises(ModelError) as e:
        staged(output(tmp_path / "out", format_="npy"), "job", 2, basis="b").publish({}, shards=4)
    assert str(e.value) == (
        "output.fields: 'z' has type float32 for records of shard 3 and float64 for those of shard 0, which another "
        "attempt or device wrote; expected one type for all records"
    )
    assert not (tmp_path / "out").exists()


def test_shards_of_another_decoder_are_named(tmp_path: Path) -> None:
    """Those who begin again can say why; where the decoder is the same, something else changed."""
    write(staged(output(tmp_path / "out"), "job", 1, basis="gpu", decoded_by="gpu, a 1.0"))
    same = staged(output(tmp_path / "out"), "job", 2, basis="other weights", decoded_by="gpu, a 1.0")
    assert (same.done, same.decoded_before) == ({}, None)
    other = staged(output(tmp_path / "out"), "job", 3, basis="cpu", decoded_by="cpu, b 2.0")
    assert (other.done, other.decoded_before) == ({}, "gpu, a 1.0")


def test_an_unfinished_output_is_not_published(tmp_path: Path) -> None:
    """A missing shard is an error, whether in the middle or at the end."""
    staging = staged(output(tmp_path / "out"), "job", 1)
    staging.write_shard(1, columns(1))
    with pytest.raises(DataError, match="1 shards were written; expected 2, numbered from 0"):
        staging.publish({})
    staging.write_shard(0, columns(0))
    with pytest.raises(DataError, match="2 shards were written; expected 3"):
        staging.publish({}, shards=3)
    assert not (tmp_path / "out").exists()


def test_discarding_leaves_nothing(tmp_path: Path) -> None:
    """A cancelled job removes what all of its attempts staged."""
    write(staged(output(tmp_path / "out"), "job", 1), upto=2)
    staged(output(tmp_path / "out"), "job", 2).discard()
    assert list(tmp_path.iterdir()) == []


def test_other_files_are_published_with_the_rest(tmp_path: Path) -> None:
    """A training's weights and metrics are in the folder and in the manifest, and what nobody named is not."""
    staging = staged(output(tmp_path / "out"), "job", 1)
    staging.file("model.safetensors").write_bytes(b"weights")
    (staging.file("model.safetensors").parent / "stray").touch()
    outputs = staging.publish({"accuracy": 1.0})
    assert outputs["files"] == ["model.safetensors", "manifest.json"]
    assert (outputs["records"], outputs["bytes"]) == (0, 7)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["manifest.json", "model.safetensors"]
    for name in ("../x", "a/b", "manifest.json", "errors.jsonl", "part-00000.parquet", ".x", ""):
        with pytest.raises(DataError, match="cannot be published"):
            staged(output(tmp_path / "o"), "job", 1).file(name)


# ---- a path that is taken


def test_if_exists_fail(tmp_path: Path) -> None:
    """An existing folder or file is refused at the start and again at publication; an empty folder is free."""
    path = tmp_path / "out"
    path.mkdir()
    staging = staged(output(path), "late", 1)
    write(staging)
    attempt(path, 1, job="early")
    with pytest.raises(OutputExists, match=r"out exists already; choose another output\.path"):
        staged(output(path), "job", 1)
    with pytest.raises(OutputExists, match="exists already"):
        staging.publish({})
    assert publish.find(path, Book(path.parent)).job_id == "early"  # type: ignore[union-attr]
    (tmp_path / "file").touch()
    with pytest.raises(OutputExists):
        check_writable(output(tmp_path / "file"), Book(tmp_path))


def test_if_exists_replace(tmp_path: Path) -> None:
    """An earlier output is replaced whole; a folder that was not published by us is never deleted."""
    path = tmp_path / "out"
    attempt(path, 1, job="old", salt=5)
    attempt(path, 1, if_exists="replace", job="new")
    assert publish.find(path, Book(path.parent)).job_id == "new"  # type: ignore[union-attr]
    assert leftovers(tmp_path) == []
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").touch()
    with pytest.raises(OutputExists, match="was not published by nimble-jobs"):
        attempt(foreign, 1, if_exists="replace")
    assert (foreign / "thesis.tex").exists()


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("mine.txt", r"it holds 1 file that job old did not publish, or that have changed since: mine\.txt; move"),
        ("mine/a", r"mine/; move"),
        (".hidden", r"\.hidden; move"),
        ("part-00000.jsonl", r"part-00000\.jsonl \(changed\); move"),
        ("errors.jsonl/a", r"errors\.jsonl \(no longer a file\); move"),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_replace_keeps_files_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, named: str, late: bool, atomic: bool
) -> None:
    """Whatever is in the folder and was not published so stays, and is named, even if it came in at the last moment."""
    path = tmp_path / "out"
    attempt(path, 1, job="old")

    def add(*_: Any) -> None:
        if (path / Path(name).parts[0]).is_file() and "/" in name:
            (path / Path(name).parts[0]).unlink()
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text("mine")

    if late:
        swap = publish._swap

        def late_swap(*args: Any) -> bool:
            monkeypatch.setattr(publish, "_swap", swap)
            add()
            return swap(*args)

        monkeypatch.setattr(publish, "_swap", late_swap)
    else:
        add()
    if not atomic:
        monkeypatch.setattr(publish, "exchange", lambda _a, _b: False)
    with pytest.raises(OutputExists, match=named):
        attempt(path, 1, if_exists="replace", job="new", salt=1)
    assert (path / name).read_text() == "mine"
    assert publish.find(path, Book(tmp_path)).job_id == "old"  # type: ignore[union-attr]
    discard_staging(path, "new")
    assert (path / name).read_text() == "mine"
    assert leftovers(tmp_path) == []


def test_many_files_of_others_are_counted(tmp_path: Path) -> None:
    """Three are named."""
    path = tmp_path / "out"
    attempt(path, 1, job="old")
    for i in range(5):
        (path / f"note-{i}").touch()
    with pytest.raises(OutputExists, match=r"it holds 5 files .*: note-0, note-1, note-2 and 2 more; move"):
        attempt(path, 1, if_exists="replace", job="new")


@pytest.mark.parametrize(
    ("forged", "why"),
    [
        ("by hand", "its manifest.json names job evil, but the state folder"),
        ("by hand without a token", "its manifest.json names job evil, but the state folder"),
        ("copied", "its manifest.json belongs to another folder, which job old published at"),
        ("copied with all files", "its manifest.json belongs to another folder, which job old published at"),
        ("changed", "its manifest.json was changed after job old published it"),
        ("of another attempt", "its manifest.json names job old, but the state folder"),
        ("other home", "its manifest.json names job old, but the state folder"),
    ],
)
@pytest.mark.parametrize("if_exists", ["replace", "resume", "own"])
@pytest.mark.parametrize("recorded", [True, False])
def test_a_manifest_that_the_store_does_not_know(
    tmp_path: Path, forged: str, why: str, if_exists: str, recorded: bool
) -> None:
    """It makes no folder replaceable, and no job take the folder for its output, whether or not the end of the job that
    published the real one is recorded.
    """
    attempt(tmp_path / "real", 1, job="old", recorded=recorded)
    path = tmp_path / "out"
    path.mkdir()
    (path / "part-00000.jsonl").write_text("mine")
    held = json.loads((tmp_path / "real" / "manifest.json").read_bytes())
    ledger = Book(tmp_path)
    match forged:
        case "by hand":
            (path / "manifest.json").write_text(json.dumps({**held, "job_id": "evil", "token": "0" * 32}))
        case "by hand without a token":
            (path / "manifest.json").write_text(
                json.dumps({k: v for k, v in {**held, "job_id": "evil"}.items() if k != "token"})
            )
        case "of another attempt":
            held = {**held, "attempt": 2, "folder": publish.folder_id(path), "token": held["token"][::-1]}
            (path / "manifest.json").write_text(json.dumps(held, indent=1, sort_keys=True))
            ledger.claim("old", 2, path)
        case "copied":
            shutil.copy(tmp_path / "real" / "manifest.json", path)
        case "copied with all files":
            shutil.copytree(tmp_path / "real", path, dirs_exist_ok=True)
        case "changed":
            shutil.rmtree(path)
            attempt(path, 1, job="old", recorded=recorded)
            why = why if recorded else "its manifest.json names job old, but the state folder"
            held = json.loads((path / "manifest.json").read_bytes())
            held["files"].append({"name": "thesis.tex", "bytes": 0, "records": None, "sha256": ""})
            (path / "manifest.json").write_text(json.dumps(held))
            (path / "thesis.tex").touch()
        case _:
            shutil.rmtree(path)
            attempt(path, 1, job="old", recorded=recorded)
            ledger = Book(tmp_path / "elsewhere")
    before = contents(path)
    job = "evil" if if_exists == "own" else "new"
    with pytest.raises(OutputExists) as caught:
        staged(output(path, "replace" if if_exists == "own" else if_exists), job, 1, basis="b", ledger=ledger)
    assert why in str(caught.value)
    assert contents(path) == before


@pytest.mark.parametrize("recorded", [True, False])
def test_a_published_folder_that_was_moved_is_still_known(tmp_path: Path, recorded: bool) -> None:
    """A rename, be it of a folder above it, keeps the folder what it is."""
    (tmp_path / "a").mkdir()
    attempt(tmp_path / "a" / "out", 1, job="old", recorded=recorded)
    (tmp_path / "a").rename(tmp_path / "b")
    path = tmp_path / "b" / "out"
    staging = staged(output(path, "replace"), "new", 1, basis="b", ledger=Book(tmp_path / "a"))
    write(staging, salt=1)
    assert staging.publish({})["records"] == 3 * SHARDS
    assert leftovers(tmp_path / "b") == []


@pytest.mark.parametrize(("moved", "known"), [(False, True), (True, False)])
def test_a_folder_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: bool, known: bool) -> None:
    """The number of its device may be another one then. At the job's own path it is still the job's output."""
    attempt(tmp_path / "out", 1)
    real = publish.folder_id
    monkeypatch.setattr(publish, "folder_id", lambda path: f"1{real(path)}")
    path = tmp_path / "moved" if moved else tmp_path / "out"
    if moved:
        (tmp_path / "out").rename(path)
    found = publish.find(path, Book(tmp_path))
    assert found is not None
    assert (found.doubt is None) is known


def test_folders_of_earlier_versions(tmp_path: Path) -> None:
    """Their manifests have no token: they count where a job of this store says of its output what they say."""
    path = tmp_path / "out"
    given = attempt(path, 1, job="old")
    held = json.loads((path / "manifest.json").read_bytes())
    del held["token"]
    (path / "manifest.json").write_text(json.dumps(held))
    ledger = Book(tmp_path)
    ledger.before["old"] = {**given, "bytes": 1}
    with pytest.raises(OutputExists, match=r"its manifest\.json names job old, but the state folder"):
        staged(output(path, "replace"), "new", 1, basis="b", ledger=ledger)
    ledger.before["old"] = given
    staging = staged(output(path, "replace"), "new", 1, basis="b", ledger=ledger)
    write(staging, salt=1)
    staging.publish({})
    assert publish.find(path, ledger).job_id == "new"  # type: ignore[union-attr]
    assert leftovers(tmp_path) == []


def test_a_link_at_the_output_path(tmp_path: Path) -> None:
    """It is refused whatever it leads to, and stays."""
    attempt(tmp_path / "real", 1, job="old")
    for target in ("real", "nothing"):
        link = tmp_path / f"to-{target}"
        link.symlink_to(target)
        with pytest.raises(OutputExists, match="is a symbolic link; choose another"):
            attempt(link, 1, if_exists="replace", job="new")
        assert link.is_symlink()


def test_if_exists_resume(tmp_path: Path) -> None:
    """Output of the same basis is taken as finished; anything else is refused."""
    path = tmp_path / "out"
    attempt(path, 1, job="old", basis="same")
    held = (path / "manifest.json").read_bytes()
    staging = staged(output(path, "resume"), "new", 1, basis="same")
    assert staging.finished is not None
    assert staging.publish({})["records"] == 3 * SHARDS
    assert (path / "manifest.json").read_bytes() == held
    for basis in ("other", ""):
        with pytest.raises(OutputExists, match="holds the output of another job"):
            staged(output(path, "resume"), "new", 1, basis=basis)


def test_no_reader_ever_sees_a_half_folder(tmp_path: Path) -> None:
    """While outputs replace each other, the path always holds one complete folder."""
    path = tmp_path / "out"
    attempt(path, 1, job="j0")
    watcher = prefork.start([sys.executable, "-c", _WATCH, str(path)], stdout=subprocess.PIPE, text=True)
    assert watcher.stdout is not None
    assert watcher.stdout.readline() == "ready\n"
    for i in range(1, 40):
        attempt(path, 1, if_exists="replace", job=f"j{i}", salt=i)
    (path.parent / "stop").touch()
    seen, _ = watcher.communicate(timeout=PATIENCE_S)
    assert json.loads(seen)["looks"] > 10
    assert json.loads(seen)["gaps"] == 0


_WATCH = """
import json, os, sys
path = sys.argv[1]
print("ready", flush=True)
looks = gaps = 0
while not os.path.exists(os.path.join(os.path.dirname(path), "stop")):
    looks += 1
    try:
        folder = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        gaps += 1
        continue
    names = os.listdir(folder)
    os.close(folder)
    # a folder that was swapped out may be emptied while it is listed; it is not at the path any more
    if "manifest.json" not in names and os.path.exists(path) and not os.path.exists(path + "/manifest.json"):
        gaps += 1
print(json.dumps({"looks": looks, "gaps": gaps}))
"""


def test_replacing_without_an_atomic_swap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two paths cannot be swapped the old folder is moved aside first, and put back if the job is given up."""
    monkeypatch.setattr(publish, "exchange", lambda _a, _b: False)
    path = tmp_path / "out"
    attempt(path, 1, job="old")
    attempt(path, 1, if_exists="replace", job="new", salt=1)
    assert publish.find(path, Book(path.parent)).job_id == "new"  # type: ignore[union-attr]
    assert leftovers(tmp_path) == []
    (tmp_path / ".out.third").mkdir()
    path.rename(tmp_path / ".out.third" / "old-1")
    staged(output(path, "replace"), "third", 2).discard()
    assert publish.find(path, Book(path.parent)).job_id == "new"  # type: ignore[union-attr]


# ---- several attempts at once


def test_a_stale_attempt_is_fenced_out(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    """An attempt whose folder a newer one cleared away can write nothing any more."""
    path = tmp_path / "w" / "out"
    stale = staged(output(path), "job", 1, basis="b")
    write(stale, upto=2)
    attempt(path, 2)
    with pytest.raises(FencedOut):
        stale.write_shard(2, columns(2, salt=9))
    assert contents(path) == undisturbed
    assert leftovers(path.parent) == []


def test_a_stale_attempt_that_publishes_first_harms_nobody(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    """The newer attempt keeps its folder, writes on, finds the job's output there and takes it for its own."""
    path = tmp_path / "w" / "out"
    stale = staged(output(path), "job", 1, basis="b")
    write(stale, upto=2)
    newer = staged(output(path), "job", 2, basis="b")
    write(stale)
    first = stale.publish({})
    write(newer)
    assert newer.publish({}) == first
    assert contents(path) == undisturbed
    assert leftovers(path.parent) == []


def test_a_stale_attempt_cannot_change_shards_that_were_taken_over(tmp_path: Path) -> None:
    """Writing a shard again replaces the file; the one that the newer attempt linked stays as it was."""
    path = tmp_path / "out"
    stale = staged(output(path), "job", 1, basis="b")
    write(stale, upto=2)
    newer = staged(output(path), "job", 2, basis="b")
    before = contents(tmp_path / ".out.job" / "attempt-2")
    stale.write_shard(0, columns(0, salt=7))
    assert contents(tmp_path / ".out.job" / "attempt-2") == before
    assert len(newer.done) == 2


def test_without_hard_links_shards_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File systems without hard links lose nothing but time."""

    def refuse(_self: Path, _target: Path) -> None:
        raise OSError(errno.EPERM, "not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    write(staged(output(tmp_path / "out"), "job", 1, basis="b"), upto=3)
    assert sorted(staged(output(tmp_path / "out"), "job", 2, basis="b").done) == [0, 1, 2]


# ---- crashes


class Crash(BaseException):
    """Stands for the end of the process: nothing in the package catches it."""


_STEPS = ("write_file", "sync_path", "link_or_copy", "remove_tree", "exchange")


def crashing(monkeypatch: pytest.MonkeyPatch, at: int, how: BaseException | None = None) -> None:
    """Ends the process just before the `at`-th call of anything that touches the disk."""
    from nimble_jobs.data import shard_files, staging

    count = itertools.count(1)  # in one step, as some steps are a thread's

    def wrapped(real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            if next(count) == at:
                raise how or Crash()
            return real(*args, **kwargs)

        return step

    for module in (files, shard_files, staging, publish):
        for name in _STEPS:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, wrapped(getattr(module, name)))
    for name in ("rename", "replace", "mkdir", "unlink", *(["rmdir"] if how is None else [])):  # which frees room
        monkeypatch.setattr(Path, name, wrapped(getattr(Path, name)))


@pytest.mark.parametrize("if_exists", ["fail", "replace", "resume"])
def test_a_crash_at_any_step_is_recovered(if_exists: str, tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    """For each step of writing and publishing: the process ends there, and the next attempt completes the output."""
    at, crashed = 0, True
    while crashed:
        at += 1
        folder = tmp_path / str(at)
        folder.mkdir()
        path = folder / "out"
        if if_exists == "replace":
            attempt(path, 1, job="old", salt=5)
        crashed = False
        with pytest.MonkeyPatch.context() as patch:
            crashing(patch, at)
            try:
                attempt(path, 1, if_exists)
            except Crash:
                crashed = True
        assert path.exists() or if_exists != "replace"
        if path.exists():  # whole at every moment
            assert set(contents(path)) == set(undisturbed)
        attempt(path, 2, if_exists)
        assert contents(path) == undisturbed, f"step {at}"
        assert leftovers(folder) == [], f"step {at}"
    assert at > 30


@pytest.mark.parametrize("if_exists", ["fail", "replace"])
def test_a_disk_that_is_full_for_a_while(if_exists: str, tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    """Whichever step meets it, the same call made again goes on, and what is published is what would have been."""
    at, refused = 0, True
    while refused:
        at += 1
        folder = tmp_path / str(at)
        folder.mkdir()
        path = folder / "out"
        if if_exists == "replace":
            attempt(path, 1, job="old", salt=5)
        staging = staged(output(path, if_exists), "job", 1, basis="b")
        refused = False
        with pytest.MonkeyPatch.context() as patch:
            crashing(patch, at, OSError(errno.ENOSPC, "No space left on device"))
            for _ in range(2):
                try:
                    write(staging)
                    staging.publish({"salt": 0}, shards=SHARDS)
                    break
                except (DataError, OSError) as e:
                    if "No space left on device" not in str(e):
                        raise
                    refused = True
        assert contents(path) == undisturbed, f"step {at}"
        assert leftovers(folder) == [], f"step {at}"
    assert at >= 20


_CHILD = """
import sys
sys.path.insert(0, sys.argv[4])
from pathlib import Path
from test_data_staging import attempt
for round in range(1000):
    print("go", flush=True)
    attempt(Path(sys.argv[1]) / str(round), int(sys.argv[2]), "replace" if sys.argv[3] == "1" else "fail")
"""


def test_sigkill_at_random_moments(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    """Twenty times a writing process is killed; whatever it left, the next attempt completes every output."""
    rng = random.Random(0)
    for round_ in range(20):
        folder = tmp_path / f"round{round_}"
        folder.mkdir()
        command = [sys.executable, "-c", _CHILD, str(folder), "1", str(round_ % 2), str(Path(__file__).parent)]
        child = prefork.start(command, stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(rng.uniform(0.0, 0.04))
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
        names = {p.name for p in folder.iterdir() if not p.name.startswith(".")}
        names |= {p.name.split(".")[1] for p in folder.iterdir() if p.name.startswith(".")}
        for name in names:
            attempt(folder / name, 2)
            assert contents(folder / name) == undisturbed
        assert leftovers(folder) == []


# ---- disks that refuse


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A parent that is a file, or in which nothing can be made, is refused before the job begins."""
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="file: cannot be written"):
        check_writable(output(tmp_path / "file" / "out"), Book(tmp_path))
    with pytest.raises(DataError, match="cannot be written"):
        check_writable(output(Path("/proc/nimble/out")), Book(tmp_path))
    check_writable(output(tmp_path / "a" / "b" / "out"), Book(tmp_path))
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_full_disk_is_an_error_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No space left: the job fails with that reason, and the shards before it are kept for another attempt."""
    staging = staged(output(tmp_path / "out"), "job", 1, basis="b")
    write(staging, upto=2)

    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DataError, match="cannot be written: No space left on device"):
            staging.write_shard(2, columns(2))
    assert sorted(staged(output(tmp_path / "out"), "job", 2, basis="b").done) == [0, 1]


def test_a_job_id_that_is_a_path_is_refused(tmp_path: Path) -> None:
    """Nothing is written outside the output's own folder."""
    with pytest.raises(DataError, match="cannot be part of a folder name"):
        staged(output(tmp_path / "out"), "../x", 1)


@pytest.mark.parametrize("adopted", [False, True])
def test_whatever_is_published_was_synced_before(
    adopted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file, the last shard's and one adopted from a killed attempt too, and the folder that names them."""
    real, synced = os.fsync, []

    def fsync(handle: int) -> None:
        synced.append(os.fstat(handle).st_ino)
        real(handle)

    def rename(source: Path, target: Path) -> Path:
        if target == tmp_path / "out":
            inodes = {f.stat().st_ino for f in source.iterdir()}
            assert inodes | {source.stat().st_ino} <= set(synced)
            checked.append(source)
        os.rename(source, target)  # noqa: PTH104  # the method itself is what is replaced
        return target

    checked: list[Path] = []
    number = 1
    if adopted:
        write(staged(output(tmp_path / "out"), "job", 1, basis="b"))
        number = 2
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    attempt(tmp_path / "out", number)
    assert len(checked) == 1


def test_a_folder_that_somebody_adds_to_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes in while it is removed goes too."""
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    rmdir = os.rmdir
    added = iter(range(3))

    def late(path: Any, **kwargs: Any) -> None:
        if (number := next(added, None)) is not None and folder.exists():
            (folder / f"late-{number}").touch()
        rmdir(path, **kwargs)

    monkeypatch.setattr(os, "rmdir", late)
    files.remove_tree(folder)
    assert not folder.exists()
