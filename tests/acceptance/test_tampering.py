"""A store that somebody or something changed: whatever it was, results are right, and what was bad is named.

Each case begins with a real store that holds the schedules of a small model for two batch sizes, each with a constant.
"""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nimble_jobs import planner
from nimble_jobs.errors import StateFolderRefused
from nimble_jobs.job import Hit
from nimble_jobs.models.build import build
from nimble_jobs.planner import Prepared, Request
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import DATABASE, resolve
from nimble_jobs.store.schedule_rows import COVERED
from nimble_jobs.worker.residency import Residents
from tests.acceptance import builders
from tests.one_batch import outputs_of
from tests.store_samples import folder_in_memory

REGIONS = 8
# Each batch size has a constant of its own.
CODE = builders.CODE.replace("[1.0, 2.0, 3.0, 4.0, 5.0]", "[float(i + len(x)) for i in range(5)]")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model and a store of both schedules."""
    folder = tmp_path_factory.mktemp("pristine")
    (folder / "model.py").write_text(CODE)
    with open_store(resolve(str(folder / "home"))) as store:
        for batch in (2, 3):
            made = prepared(store, folder, batch)
            assert (made.hit, made.summary()["runs"]) == (Hit.MISS, "schedule")
    return folder


@pytest.fixture
def folder(pristine: Path) -> Iterator[Path]:
    """A copy of it, to be damaged."""
    with folder_in_memory() as made:
        yield Path(shutil.copytree(pristine, Path(made) / "copy"))


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    with open_store(resolve(str(folder / "home"))) as opened:
        yield opened


def request(folder: Path, batch: int) -> Request:
    return replace(builders.request(folder / "model.py"), batch_size=batch)


def prepared(store: Store, folder: Path, batch: int = 2) -> Prepared:
    return planner.prepare(request(folder, batch), device=CPU, store=store, residents=Residents(2**30))


def key_of(folder: Path, batch: int = 2) -> str:
    return planner.schedule_key(planner.key_parts(request(folder, batch), CPU))


def artifact(store: Store, folder: Path, batch: int = 2) -> Path:
    (ref,) = store.schedules.artifacts()[key_of(folder, batch)]
    return store.home / "artifacts" / ref.name[:2] / ref.name


def changed_behind(store: Store, statement: str, *values: Any) -> None:
    """Change the database as something else than this package would."""
    with closing(sqlite3.connect(store.home / DATABASE, isolation_level=None)) as connection:
        connection.execute(statement, values)


def value_of(store: Store, table: str, column: str, key: str) -> Any:
    with closing(sqlite3.connect(store.home / DATABASE)) as connection:
        return connection.execute(
            f"SELECT CAST({column} AS BLOB), {column} FROM {table} WHERE key = ?", (key,)
        ).fetchone()


def right(made: Prepared, folder: Path, batch: int = 2) -> bool:
    """Whether the outputs have the bits of the model in eager."""
    x = torch.linspace(-1, 1, batch * 64).reshape(batch, 1, 8, 8)
    outputs = outputs_of(made.loaded, x)
    module = build(request(folder, batch).model, allowed_python=(folder,))
    with torch.no_grad():
        return torch.equal(outputs["output"], module(x))


def heals(store: Store, folder: Path, *, quarantined: bool = True, batches: tuple[int, ...] = (2,)) -> str:
    """The next job misses, builds again, and is right; the one after it has a sound stored hit. Returns the reason."""
    reason = ""
    for batch in batches:
        before = len([e for e in store.jobs.events() if e.kind == "quarantined"])
        made = prepared(store, folder, batch)
        reason = str(made.miss_reason)
        assert (made.hit, made.summary()["runs"]) == (Hit.MISS, "schedule")
        assert right(made, folder, batch)
        events = [e for e in store.jobs.events() if e.kind == "quarantined"][before:]
        assert len(events) == quarantined
        assert all(key_of(folder, batch)[:16] in e.message for e in events)
        again = prepared(store, folder, batch)
        assert again.hit is Hit.STORED
        assert right(again, folder, batch)
    return reason


def flipped(data: bytes, region: int, regions: int = REGIONS) -> bytes:
    """One bit flipped in the middle of a region of the bytes."""
    at = (2 * region + 1) * len(data) // (2 * regions)
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_untouched(store: Store, folder: Path) -> None:
    """Without any damage both are stored hits: what the other tests see comes from what they do."""
    for batch in (2, 3):
        made = prepared(store, folder, batch)
        assert made.hit is Hit.STORED
        assert right(made, folder, batch)
    assert artifact(store, folder, 2) != artifact(store, folder, 3)
    assert store.check() == []


@pytest.mark.parametrize("region", range(REGIONS))
def test_flipped_artifact(store: Store, folder: Path, region: int) -> None:
    """A flipped bit anywhere in an artifact."""
    path = artifact(store, folder)
    path.write_bytes(flipped(path.read_bytes(), region))
    assert "its bytes have changed (the SHA-256 differs from the name)" in heals(store, folder)
    assert store.check() == []


@pytest.mark.parametrize("size", [0, 1, 10, 19])
def test_truncated_artifact(store: Store, folder: Path, size: int) -> None:
    """An artifact that lost its end, or everything."""
    path = artifact(store, folder)
    path.write_bytes(path.read_bytes()[:size])
    assert "its bytes have changed (the SHA-256 differs from the name)" in heals(store, folder)
    assert store.check() == []


def test_longer_artifact(store: Store, folder: Path) -> None:
    """An artifact with something behind it."""
    path = artifact(store, folder)
    path.write_bytes(path.read_bytes() + b"\0")
    assert "its bytes have changed (the SHA-256 differs from the name)" in heals(store, folder)


def test_swapped_artifacts(store: Store, folder: Path) -> None:
    """Two artifacts under each other's names: both schedules are built again."""
    one, other = artifact(store, folder, 2), artifact(store, folder, 3)
    ours, theirs = one.read_bytes(), other.read_bytes()
    one.write_bytes(theirs)
    other.write_bytes(ours)
    heals(store, folder, batches=(2, 3))
    assert store.check() == []


def test_deleted_artifact(store: Store, folder: Path) -> None:
    """An artifact that is gone."""
    artifact(store, folder).unlink()
    assert "is not stored" in heals(store, folder)
    assert store.check() == []


@pytest.mark.parametrize(
    "kind", ["folder", "symlink", "fifo", "a link for its folder", "a dangling link for its folder"]
)
def test_artifact_of_another_kind(store: Store, folder: Path, kind: str) -> None:
    """Something else than a file has its name. A link is not followed, even to the right bytes."""
    path = artifact(store, folder)
    data = path.read_bytes()
    path.unlink()
    match kind:
        case "folder":
            (path / "deep").mkdir(parents=True, mode=0o700)
        case "a link for its folder":
            (path.parent).rename(folder / "elsewhere")
            path.parent.symlink_to(folder / "elsewhere")
        case "a dangling link for its folder":
            shutil.rmtree(path.parent)
            path.parent.symlink_to(folder / "nothing")
        case "symlink":
            (folder / "elsewhere").write_bytes(data)
            path.symlink_to(folder / "elsewhere")
        case _:
            os.mkfifo(path, 0o600)
    assert "the stored schedule was not used" in heals(store, folder)
    assert store.check() == []


@pytest.mark.parametrize("what", ["file", "its folder"])
@pytest.mark.parametrize("who", ["written by others", "owned by others"])
def test_artifact_that_others_could_change(store: Store, folder: Path, what: str, who: str) -> None:
    """Sound bytes count for nothing where somebody else may change them after they were verified."""
    path = artifact(store, folder)
    path = path if what == "file" else path.parent
    if who == "written by others":
        path.chmod(0o777)
    elif os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    else:
        os.chown(path, 12345, -1)
        if what == "its folder":
            assert "belongs to user 12345" in heals(store, folder)
            (line,) = store.check()  # it was put aside
            assert re.search(rf"/\.{path.name}\.[0-9a-f]{{8}}: belongs to user 12345", line)
            return
    assert ("others can write to it" if who == "written by others" else "belongs to user") in heals(store, folder)
    assert store.check() == []


@pytest.mark.parametrize("which", [".", "artifacts"])
def test_world_writable_state_folder(folder: Path, which: str) -> None:
    """It is refused with its reason: when it is opened, and by a process that has had it open for long."""
    with open_store(resolve(str(folder / "home"))) as store:
        (store.home / which).chmod(0o777)
        with pytest.raises(StateFolderRefused, match=r"others can write to it \(mode 0777\)"):
            prepared(store, folder)
        with pytest.raises(StateFolderRefused, match=r"others can write to it \(mode 0777\)"):
            resolve(str(folder / "home"))
        (store.home / which).chmod(0o700)
        assert prepared(store, folder).hit is Hit.STORED


@pytest.mark.parametrize("region", range(REGIONS))
def test_flipped_json(store: Store, folder: Path, region: int) -> None:
    """A flipped bit anywhere in the JSON of a schedule."""
    key = key_of(folder)
    raw, _ = value_of(store, "schedule_texts", "text", key)
    changed_behind(store, "UPDATE schedule_texts SET text = CAST(? AS TEXT) WHERE key = ?", flipped(raw, region), key)
    assert "damaged" in heals(store, folder)
    assert store.check() == []


TEXTS = ("parts", "model", "device", "input", "dtype", "mode", "provenance", "sha256", "state")
OTHER_TEXTS = (("schedule_artifacts", "name"), ("schedule_artifacts", "kind"))


@pytest.mark.parametrize("third", range(3))
@pytest.mark.parametrize(("table", "column"), [*(("schedules", name) for name in TEXTS), *OTHER_TEXTS])
def test_flipped_text_column(store: Store, folder: Path, table: str, column: str, third: int) -> None:
    """A flipped bit anywhere in a text of a stored row."""
    key = key_of(folder)
    raw, _ = value_of(store, table, column, key)
    other = flipped(raw, third, 3)
    changed_behind(store, f"UPDATE {table} SET {column} = CAST(? AS TEXT) WHERE key = ?", other, key)
    assert "damaged" in heals(store, folder)
    assert store.check() == []


NUMBERS = ("format_version", "streams", "syncs", "replay_us", "eager_us", "bytes", "created_at", "build_s")


@pytest.mark.parametrize("change", ["higher", "huge", "text", "blob"])
@pytest.mark.parametrize(("table", "column"), [*(("schedules", n) for n in NUMBERS), ("schedule_artifacts", "bytes")])
def test_changed_number_column(store: Store, folder: Path, table: str, column: str, change: str) -> None:
    """Another number in a stored row, or none at all."""
    key = key_of(folder)
    _, value = value_of(store, table, column, key)
    other = {"higher": value + 1, "huge": 2**62, "text": "12a", "blob": b"\xff\x00"}[change]
    changed_behind(store, f"UPDATE {table} SET {column} = ? WHERE key = ?", other, key)
    assert "damaged" in heals(store, folder)
    assert store.check() == []


def test_every_covered_column_is_changed_here() -> None:
    """A column that the digest covers has its case above."""
    assert set(COVERED) - {"key"} == (set(TEXTS) - {"sha256", "state"}) | set(NUMBERS)


@pytest.mark.parametrize(
    "values",
    [
        {"refused": 1},
        {"refused": 1, "reason": "x", "hits": -5, "resident_hits": 99, "last_used_at": 0.0},
        {"hits": 2**62, "last_used_at": 1e300},
    ],
)
def test_columns_that_do_not_count(store: Store, folder: Path, values: dict[str, Any]) -> None:
    """What changes with use may be anything: a sound schedule is served all the same."""
    changes = ", ".join(f"{column} = ?" for column in values)
    changed_behind(store, f"UPDATE schedules SET {changes} WHERE key = ?", *values.values(), key_of(folder))
    made = prepared(store, folder)
    assert made.hit is Hit.STORED
    assert right(made, folder)


@pytest.mark.parametrize("kept", [0, 1, 100, -1])
def test_truncated_json(store: Store, folder: Path, kept: int) -> None:
    """A JSON text that lost its end."""
    raw, _ = value_of(store, "schedule_texts", "text", key_of(folder))
    changed_behind(store, "UPDATE schedule_texts SET text = ? WHERE key = ?", raw[:kept].decode(), key_of(folder))
    assert "damaged" in heals(store, folder)


def test_swapped_texts(store: Store, folder: Path) -> None:
    """Two schedules under each other's rows."""
    one, other = key_of(folder, 2), key_of(folder, 3)
    texts = [value_of(store, "schedule_texts", "text", key)[1] for key in (one, other)]
    for key, text in zip((other, one), texts, strict=True):
        changed_behind(store, "UPDATE schedule_texts SET text = ? WHERE key = ?", text, key)
    heals(store, folder, batches=(2, 3))
    assert store.check() == []


def test_swapped_rows(store: Store, folder: Path) -> None:
    """Whole rows, texts and artifacts under each other's keys: the digest knows whose they are."""
    one, other = key_of(folder, 2), key_of(folder, 3)
    for table in ("schedules", "schedule_texts", "schedule_artifacts"):
        for old, new in ((one, "x"), (other, one), ("x", other)):
            changed_behind(store, f"UPDATE {table} SET key = ? WHERE key = ?", new, old)
    heals(store, folder, batches=(2, 3))
    assert store.check() == []


@pytest.mark.parametrize("table", ["schedule_texts", "schedule_artifacts"])
def test_deleted_row(store: Store, folder: Path, table: str) -> None:
    """A schedule without its JSON, or without the names of its artifacts."""
    changed_behind(store, f"DELETE FROM {table} WHERE key = ?", key_of(folder))
    assert "damaged" in heals(store, folder)
    assert store.check() == []


def test_deleted_schedule(store: Store, folder: Path) -> None:
    """A schedule whose row alone is gone: there is nothing to quarantine, and what it left does not get in the way."""
    changed_behind(store, "DELETE FROM schedules WHERE key = ?", key_of(folder))
    assert "no schedule is stored" in heals(store, folder, quarantined=False)
    assert store.check() == []


def test_added_artifact_row(store: Store, folder: Path) -> None:
    """An artifact that the schedule was not stored with."""
    changed_behind(store, "INSERT INTO schedule_artifacts VALUES (?, ?, 'constant', 1)", key_of(folder), "0" * 64)
    assert "damaged" in heals(store, folder)


@pytest.mark.parametrize("region", range(REGIONS))
def test_flipped_key(store: Store, folder: Path, region: int) -> None:
    """A row under a key that is not its own: a miss for whom it belonged to, and found damaged by the check."""
    key = key_of(folder)
    other = flipped(key.encode(), region).decode()
    changed_behind(store, "UPDATE schedules SET key = ? WHERE key = ?", other, key)
    assert "no schedule is stored" in heals(store, folder, quarantined=False)
    assert any(other in problem for problem in store.check())
    assert store.schedules.lookup(other).stored is None
    assert store.schedules.get(other).state == "quarantined"
