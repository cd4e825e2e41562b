"""Schedules carried from one state folder to another: whole, or refused with what is wrong."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nimble_jobs.engine import device as devices
from nimble_jobs.errors import Damaged, StoreError, UsageError
from nimble_jobs.job import Hit
from nimble_jobs.nimble.inference import parts_of
from nimble_jobs.packing import text_layout
from nimble_jobs.planner import Request, key_parts, prepare, schedule_key
from nimble_jobs.planner.keys.options import BuildOptions
from nimble_jobs.planner.keys.step import forward_parts
from nimble_jobs.planner.lookup.transfer import ImportedSchedule, _foreign, import_schedules
from nimble_jobs.schedule import CompiledKernel
from nimble_jobs.sentence import Pooling
from nimble_jobs.spec import ModelSpec
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.bundle import Bundle, write_bundle
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.residency import Residents
from tests.configured import configure
from tests.store_samples import NOW

CPU = torch.device("cpu")
CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def forward(self, x):
        return (x + torch.tensor([1.0, 2.0, 3.0])).relu()

def net():
    return Net()
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(CODE)
    return path


@pytest.fixture
def here(tmp_path: Path, code: Path) -> Iterator[Store]:
    """A store with one schedule, which has a constant."""
    with open_store(resolve(str(tmp_path / "here"))) as store:
        prepare(request(code), device=CPU, store=store, residents=Residents(2**30))
        yield store


@pytest.fixture
def there(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "there"))) as store:
        yield store


def request(code: Path) -> Request:
    return Request(
        model=ModelSpec(source=f"python:{code}:net"),
        shape=(3,),
        dtype="float32",
        batch_size=2,
        allowed_python=(code.parent,),
    )


def exported(store: Store, path: Path) -> Path:
    write_bundle(store, [entry.key for entry in store.schedules.list()], path, NOW)
    return path


def imported(path: Path, store: Store, agreed: Callable[[int], bool] = lambda _: True) -> list[ImportedSchedule]:
    return list(import_schedules(path, store=store, now=NOW, agreed=agreed).schedules)


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def rewritten(path: Path, change: Callable[[dict[str, bytes], Any], None]) -> Path:
    """The file again, its members and manifest changed."""
    held = members(path)
    manifest = json.loads(held.pop("manifest.json"))
    change(held, manifest)
    if manifest is not None:
        held["manifest.json"] = json.dumps(manifest).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in held.items():
            archive.writestr(name, data)
    return path


def test_what_was_exported_is_a_stored_hit_elsewhere(here: Store, there: Store, code: Path, tmp_path: Path) -> None:
    """Text, constants, key parts and origin arrive; the other state folder serves the schedule without building."""
    (entry,) = here.schedules.list()
    path = exported(here, tmp_path / "one.zip")
    (taken,) = imported(path, there)
    assert (taken.taken, taken.key) == (True, entry.key)
    found = there.schedules.verified(entry.key)
    assert found.text == here.schedules.verified(entry.key).text
    assert (found.parts, found.build_s, found.hits) == (entry.parts, entry.build_s, 0)
    assert found.provenance.items() >= entry.provenance.items()
    assert found.provenance["imported_from"] == "one.zip"
    assert there.check() == []
    assert prepare(request(code), device=CPU, store=there, residents=Residents(2**30)).hit is Hit.STORED


def test_what_is_there_stays(here: Store, there: Store, tmp_path: Path) -> None:
    """A second import changes nothing and says so, also where the first one was quarantined since."""
    path = exported(here, tmp_path / "one.zip")
    imported(path, there)
    (entry,) = there.schedules.list()
    there.schedules.quarantine(entry.key, "in doubt", NOW)
    (taken,) = imported(path, there)
    assert (taken.taken, taken.said) == (False, "is stored here already, quarantined; left as it is")
    assert there.schedules.get(entry.key).state == "quarantined"


def test_only_sound_schedules_are_exported(here: Store, tmp_path: Path) -> None:
    """Not a quarantined one, nor one whose constant was damaged; a file that exists is not replaced."""
    (entry,) = here.schedules.list()
    path = tmp_path / "one.zip"
    path.write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        exported(here, path)
    assert path.read_text() == "mine"
    (name,) = here.artifacts.names()
    artifact = here.home / "artifacts" / name[:2] / name
    data = artifact.read_bytes()
    artifact.write_bytes(data[:-1] + b"?")
    with pytest.raises(Damaged):
        exported(here, tmp_path / "two.zip")
    artifact.write_bytes(data)
    here.schedules.quarantine(entry.key, "in doubt", NOW)
    with pytest.raises(UsageError, match="is quarantined: in doubt; expected a ready one"):
        exported(here, tmp_path / "two.zip")
    assert sorted(p.name for p in tmp_path.glob("*zip*")) == ["one.zip"], "nothing half is left"


def test_an_export_that_cannot_be_written_names_its_file(
    here: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is not there, a file in its place, a full disk: said of the file, and nothing is left."""
    (tmp_path / "a-file").write_text("")
    for path, said in (
        (tmp_path / "none" / "one.zip", "No such file or directory"),
        (tmp_path / "a-file" / "one.zip", "Not a directory"),
    ):
        with pytest.raises(StoreError, match=f"{path}: {said}; nothing was exported"):
            exported(here, path)
    monkeypatch.setattr("zipfile.ZipFile.writestr", full_disk)
    with pytest.raises(StoreError, match=r"one\.zip: No space left on device; nothing was exported"):
        exported(here, tmp_path / "one.zip")
    assert list(tmp_path.glob("*zip*")) == []


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_an_export_never_replaces_what_came_meanwhile(
    here: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another export to the same name, begun while this one writes, is refused; this one is whole."""
    (entry,) = here.schedules.list()
    refused = []
    writestr = zipfile.ZipFile.writestr

    def meanwhile(*args: Any) -> None:
        if not refused:
            refused.append(True)
            with pytest.raises(UsageError, match="exists already"):
                exported(here, tmp_path / "one.zip")
        writestr(*args)

    monkeypatch.setattr("zipfile.ZipFile.writestr", meanwhile)
    with Bundle(exported(here, tmp_path / "one.zip")) as bundle:
        assert [bundled.key for bundled in bundle.schedules] == [entry.key]
    assert refused
    assert list(tmp_path.glob("*zip*")) == [tmp_path / "one.zip"]


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("torch", "2.10.0", r"made elsewhere: torch is 2\.10\.0, here "),
        ("device.name", "Another CPU", "made elsewhere: device.name is Another CPU, here "),
        ("format", "1", "written in format 1; this version reads "),
    ],
)
def test_foreign_schedules_are_refused(
    here: Store, there: Store, tmp_path: Path, part: str, value: str, said: str
) -> None:
    """Another device or other software, its key true to its parts: refused by name, and nothing of the file is kept."""
    (entry,) = here.schedules.list()
    parts = entry.parts | {part: value}
    foreign = replace(here.schedules.verified(entry.key).load(), key=schedule_key(parts))
    here.schedules.save(foreign, parts=parts, now=NOW)
    with pytest.raises(UsageError, match=said):
        imported(exported(here, tmp_path / "two.zip"), there)
    assert (there.schedules.list(), list(there.artifacts.names())) == ([], [])


def _parts(held: dict[str, bytes], manifest: Any) -> None:
    manifest["schedules"][0]["parts"]["mode"] = "training"


def _missing(held: dict[str, bytes], manifest: Any) -> None:
    held.pop(next(name for name in held if name.startswith("artifacts/")))


def _stray(held: dict[str, bytes], manifest: Any) -> None:
    held["../../evil"] = b""


def _no_artifact(held: dict[str, bytes], manifest: Any) -> None:
    _missing(held, manifest)
    manifest["schedules"][0]["artifacts"] = []


def _retext(held: dict[str, bytes], manifest: Any, old: bytes, new: bytes) -> None:
    name = next(name for name in held if name.startswith("schedules/"))
    assert old in held[name]
    held[name] = held[name].replace(old, new, 1)
    entry = manifest["schedules"][0]
    entry["text_sha256"], entry["text_bytes"] = hashlib.sha256(held[name]).hexdigest(), len(held[name])


def _plan(held: dict[str, bytes], manifest: Any) -> None:
    _retext(held, manifest, b'"order":[0,1', b'"order":[1,0')


def _spaces(held: dict[str, bytes], manifest: Any) -> None:
    _retext(held, manifest, b'{"', b'{ "')


def _not_json(held: dict[str, bytes], manifest: Any) -> None:
    _retext(held, manifest, b"{", b"[")


def _measured(held: dict[str, bytes], manifest: Any) -> None:
    _retext(held, manifest, b'"tolerance":', b'"tolerance":"none at all","was":')


def _numbers(held: dict[str, bytes], manifest: Any) -> None:
    _retext(held, manifest, b'"in_flight":1', b'"in_flight":"many"')


def _buffer(held: dict[str, bytes], manifest: Any) -> None:
    _retext(held, manifest, b'"constants":[{"name"', b'"constants":[{"nam"')


def _other_key(held: dict[str, bytes], manifest: Any) -> None:
    _retext(held, manifest, manifest["schedules"][0]["key"].encode(), b"0" * 64)


def _created(value: float) -> Callable[[dict[str, bytes], Any], None]:
    def change(held: dict[str, bytes], manifest: Any) -> None:
        manifest["schedules"][0]["created_at"] = value

    return change


def _part(name: str, value: str) -> Callable[[dict[str, bytes], Any], None]:
    """A part changed or added, and the key with it, so that nothing but the part is wrong."""

    def change(held: dict[str, bytes], manifest: Any) -> None:
        entry = manifest["schedules"][0]
        old = entry["key"]
        entry["parts"][name] = value
        entry["key"] = schedule_key(entry["parts"])
        held[f"schedules/{entry['key']}.json"] = held.pop(f"schedules/{old}.json")
        _retext(held, manifest, old.encode(), entry["key"].encode())

    return change


def _host(held: dict[str, bytes], manifest: Any) -> None:
    manifest["schedules"][0]["provenance"]["host"] = "\x1b[2Jmine"


def _device(held: dict[str, bytes], manifest: Any) -> None:
    _retext(held, manifest, b'"device":"', b'"device":"\\u001b[2J')


def _enormous(held: dict[str, bytes], manifest: Any) -> None:
    _retext(held, manifest, b'"in_flight":1', b'"in_flight":1' + b"0" * 400)


def _format(held: dict[str, bytes], manifest: Any) -> None:
    manifest["format"] = 99


def _huge(held: dict[str, bytes], manifest: Any) -> None:
    manifest["schedules"][0]["text_bytes"] = 1 << 40


def _longer(held: dict[str, bytes], manifest: Any) -> None:
    held[next(name for name in held if name.startswith("artifacts/"))] += b"more"


def _path_as_key(held: dict[str, bytes], manifest: Any) -> None:
    manifest["schedules"][0]["key"] = "../../evil"


def _twice(held: dict[str, bytes], manifest: Any) -> None:
    manifest["schedules"] *= 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_parts, "its key does not match its parts"),
        (_missing, "is missing"),
        (_stray, r"'\.\./\.\./evil' is not in the manifest"),
        (_no_artifact, "its artifacts in the file are not those that it needs"),
        (_plan, "order"),
        (_spaces, "its JSON is not in the canonical form"),
        (_not_json, "schedule "),
        (_measured, "not a sound schedule: ValueError: not a schedule"),
        (_numbers, "in_flight is 'many'; expected a number"),
        (_buffer, "not a sound schedule: "),
        (_other_key, "its JSON belongs to schedule 000000000000"),
        (_format, "format 99; this version reads 1"),
        (_huge, "expected at most"),
        (_longer, "does not have the 12 bytes of the manifest"),
        (_path_as_key, "expected a SHA-256 in lower-case hex"),
        (_twice, "lists a schedule twice"),
        (_created(1e300), "found 1e\\+300; expected a time in seconds since 1970"),
        (_created(float("nan")), "found nan; expected a time"),
        (_created(-1.0), "expected a time"),
        (_created(True), "expected a time"),
        (_part("model.source", "\x1b[31mred"), r"found '\\x1b\[31mred'; expected text without control characters"),
        (_part("model.source", "a\0b"), "expected text without control characters"),
        (_part("model.source", "\ud800"), r"found '\\ud800'; expected text without control characters"),
        (_part("colour", "red"), "made elsewhere: colour is red, here unknown"),
        (_part("device.colour", "red"), "made elsewhere: device.colour is red, here unknown"),
        (_host, "expected text without control characters"),
        (_device, "device is '.*; expected text"),
        (_enormous, "in_flight is 1000.*; expected a number"),
    ],
)
def test_files_that_were_changed_are_refused(
    here: Store, there: Store, tmp_path: Path, change: Callable[[dict[str, bytes], Any], None], said: str
) -> None:
    """Whoever changed the file, however carefully: the import names what is wrong, and keeps nothing."""
    path = rewritten(exported(here, tmp_path / "one.zip"), change)
    with pytest.raises(UsageError, match=said):
        imported(path, there)
    assert (there.schedules.list(), list(there.artifacts.names())) == ([], [])
    assert not list(tmp_path.rglob("evil"))


def test_a_manifest_nested_too_deeply_is_refused(there: Store, tmp_path: Path) -> None:
    """Deeper than any parser goes: no error of the parser's own."""
    path = tmp_path / "deep.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", "[" * 100_000)
    with pytest.raises(UsageError, match="RecursionError"):
        imported(path, there)


def _again(store: Store, constant: bytes, tolerance: str) -> str:
    """The store's first schedule under another key, with compiled kernels of its own; returns the key."""
    entry = store.schedules.list()[0]
    parts = entry.parts | {"tolerance": tolerance}
    kernel = CompiledKernel(
        name="k", function="f", grid=(1, 1, 1), warps=4, shared_bytes=0, arg_types="", start=0, nbytes=len(constant)
    )
    schedule = replace(
        store.schedules.verified(entry.key).load(),
        key=schedule_key(parts),
        compiled=(kernel,),
        binaries=store.artifacts.put(constant),
    )
    store.schedules.save(schedule, parts=parts, now=NOW)
    return schedule.key


def test_one_bad_schedule_keeps_out_all(here: Store, there: Store, tmp_path: Path) -> None:
    """Whichever of the file it is: nothing before it is stored, neither its rows nor its artifacts."""
    _again(here, b"code" * 25, "0.25")

    def last(held: dict[str, bytes], manifest: Any) -> None:
        manifest["schedules"][-1]["created_at"] = 1e300

    path = rewritten(exported(here, tmp_path / "two.zip"), last)
    with pytest.raises(UsageError, match="expected a time"):
        imported(path, there)
    assert (there.schedules.list(), list(there.artifacts.names())) == ([], [])


def test_an_import_that_cannot_be_saved_leaves_no_row(
    here: Store, there: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full at the second artifact: no schedule of the file is there."""
    _again(here, b"code" * 25, "0.25")
    path = exported(here, tmp_path / "two.zip")
    put, stored = there.artifacts.put, []

    def full(data: bytes) -> str:
        if stored:
            raise StoreError("No space left on device")
        stored.append(put(data))
        return stored[0]

    monkeypatch.setattr(there.artifacts, "put", full)
    with pytest.raises(StoreError, match="No space left"):
        imported(path, there)
    assert there.schedules.list() == []
    assert there.check() == []


def test_an_import_keeps_what_it_brought(here: Store, there: Store, tmp_path: Path) -> None:
    """Under a size cap what was there goes, and is named; a file that would not fit at all is refused."""
    others = [_again(here, bytes([i]) * 5000, f"0.{i}5") for i in (1, 2)]
    path, small = tmp_path / "three.zip", tmp_path / "one.zip"
    write_bundle(here, others, path, NOW)
    first = next(entry for entry in here.schedules.list() if entry.key not in others)
    write_bundle(here, [first.key], small, NOW)
    imported(small, there)
    sizes = {entry.key: entry.bytes for entry in here.schedules.list()}
    configure(there.home, f"cache: {{size: {sizes[others[0]] + 10}}}")
    with pytest.raises(UsageError, match=r"cache.size allows .* nothing was imported"):
        imported(path, there)
    assert [entry.key for entry in there.schedules.list()] == [first.key]
    configure(there.home, f"cache: {{size: {sum(sizes[key] for key in others) + 10}}}")
    done = import_schedules(path, store=there, now=NOW, agreed=lambda _: True)
    assert [taken.taken for taken in done.schedules] == [True, True]
    assert [entry.key for entry in done.removed] == [first.key]
    assert {entry.key for entry in there.schedules.list()} == set(others)
    assert there.check() == []


def test_parts_that_we_make_ourselves_are_known(here: Store, code: Path) -> None:
    """Keys of jobs and of wrapped modules hold no part that an import would refuse."""
    program = here.schedules.verified(here.schedules.list()[0].key).load().program
    texts = text_layout(8, vocabulary=40)
    pooled = replace(
        request(code), shape=(texts.nbytes,), dtype="uint8", packing=texts, pooling=Pooling(modes=("mean",))
    )
    step = {name: value for name, value in key_parts(request(code), CPU).items() if name != "outputs"}
    keys = [key_parts(request(code), CPU), key_parts(pooled, CPU), parts_of(program, BuildOptions(), CPU)]
    for parts in (*keys, forward_parts(step, torch.zeros(2, 3), "given")):
        assert _foreign(parts, devices.facts(CPU)) == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(data=st.data())
def test_a_flipped_bit_anywhere_never_arrives(here: Store, there: Store, tmp_path: Path, data: st.DataObject) -> None:
    """It is refused, or lies where it changes nothing that is stored."""
    path = tmp_path / "flip.zip"
    path.unlink(missing_ok=True)
    raw = bytearray(exported(here, path).read_bytes())
    at, bit = data.draw(st.integers(0, len(raw) - 1)), data.draw(st.integers(0, 7))
    raw[at] ^= 1 << bit
    path.write_bytes(raw)
    try:
        imported(path, there)
    except UsageError:
        assert there.schedules.list() == []
        return
    (entry,) = there.schedules.list()
    assert there.schedules.verified(entry.key).text == here.schedules.verified(entry.key).text
    assert there.check() == []
    there.schedules.remove([entry.key])


def test_what_is_no_such_file_is_refused(there: Store, tmp_path: Path) -> None:
    """A missing file, a text, an empty archive, one with a manifest of another kind."""
    path = tmp_path / "one.zip"
    with pytest.raises(UsageError, match="No such file"):
        imported(path, there)
    path.write_text("no archive")
    with pytest.raises(UsageError, match="expected a file that `cache export` wrote"):
        imported(path, there)
    for manifest in (None, b"", b"[]", b"{}", b'{"format": 1}', b'{"format": 1, "schedules": [1]}'):
        with zipfile.ZipFile(path, "w") as archive:
            if manifest is not None:
                archive.writestr("manifest.json", manifest)
        with pytest.raises(UsageError, match="expected a file that `cache export` wrote"):
            imported(path, there)


def test_an_archive_of_a_later_zip_version_is_refused(here: Store, there: Store, tmp_path: Path) -> None:
    """One that says of its first member that more is needed to read it than this Python knows."""
    path = exported(here, tmp_path / "one.zip")
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"PK\x01\x02") + 6] = 84
    path.write_bytes(raw)
    with pytest.raises(UsageError, match=r"zip file version 8\.4; expected a file that `cache export` wrote"):
        imported(path, there)


def test_a_member_that_unpacks_to_more_than_it_says_is_not_unpacked(here: Store, tmp_path: Path) -> None:
    """Reading stops at the promised size, however much a compressed member would give."""
    path = exported(here, tmp_path / "one.zip")
    held = members(path)
    held[next(name for name in held if name.startswith("schedules/"))] = b" " * (64 << 20)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in held.items():
            archive.writestr(name, data)
    with Bundle(path) as bundle, pytest.raises(UsageError, match="does not have the"):
        bundle.text(bundle.schedules[0])


def test_machine_code_asks_first(here: Store, there: Store, tmp_path: Path) -> None:
    """A file with compiled kernels is taken only where somebody agreed, who is told how much it is."""
    (entry,) = here.schedules.list()
    code = b"\x7fELF" * 25
    kernel = CompiledKernel(
        name="k", function="f", grid=(1, 1, 1), warps=4, shared_bytes=0, arg_types="", start=0, nbytes=len(code)
    )
    parts = entry.parts | {"schedule.fuse": "max"}
    schedule = replace(
        here.schedules.verified(entry.key).load(),
        key=schedule_key(parts),
        compiled=(kernel,),
        binaries=here.artifacts.put(code),
    )
    here.schedules.save(schedule, parts=parts, now=NOW)
    path = exported(here, tmp_path / "two.zip")
    asked: list[int] = []
    assert imported(path, there, lambda nbytes: bool(asked.append(nbytes))) == []
    assert (asked, there.schedules.list()) == ([100], [])
    assert [taken.taken for taken in imported(path, there)] == [True, True]
    assert there.check() == []


def test_the_key_of_this_machine_is_that_of_its_parts(code: Path) -> None:
    """What import recomputes is what prepare looks up."""
    parts = key_parts(request(code), CPU)
    assert schedule_key(dict(reversed(parts.items()))) == schedule_key(parts)
