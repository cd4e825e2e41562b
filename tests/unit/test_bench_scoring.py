"""`bench scoring`: files, page cache, settings and loops; and whole runs with tiny settings."""

from __future__ import annotations

import dataclasses
import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nimble_jobs.bench import loops
from nimble_jobs.bench.scoring import (
    System,
    Workshop,
    fixed_of,
    page_cache,
    photos,
    process,
    size_of,
    systems_of,
)
from nimble_jobs.bench.scoring.measure import measure
from nimble_jobs.bench.scoring.request import WITHOUT_GPU, ScoringRequest, Setting, Wanted
from nimble_jobs.errors import UsageError
from tests import prefork
from tests.loops import LOOPS, check_answers, photo

SOURCES = Path(loops.__file__).parent
BY_HAND = [system for system in System if not system.ours]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """20 JPEGs of 64x48."""
    folder = tmp_path_factory.mktemp("pictures")
    return photos.provide(folder / "jpeg", recipe(20), [photo(folder / "photo.png")], lambda _: None)


def recipe(count: int, **values: int) -> photos.Recipe:
    return photos.Recipe(**{"count": count, "width": 64, "height": 48, "photos": ("photo.png",), **values})  # type: ignore[arg-type]


# ---- files


def test_jpegs_are_decided_by_the_seed(pictures: list[Path], tmp_path: Path) -> None:
    """The same recipe makes the same bytes, another seed other ones; every file differs."""
    again = photos.provide(tmp_path / "a", recipe(20), [photo(tmp_path / "photo.png")], lambda _: None)
    other = photos.provide(tmp_path / "b", recipe(20, seed=1), [tmp_path / "photo.png"], lambda _: None)
    assert [f.read_bytes() for f in again] == [f.read_bytes() for f in pictures]
    assert {f.read_bytes() for f in other}.isdisjoint(f.read_bytes() for f in pictures)
    assert len({f.read_bytes() for f in pictures}) == 20


def test_jpegs_have_a_realistic_size(tmp_path: Path) -> None:
    """About 40 to 60 KB for 500x375 at quality 90, as photographs have, whatever they are made from."""
    sources = [photo(tmp_path / "photo.png")]
    noise = np.random.default_rng(0).integers(0, 256, (427, 640, 3), dtype=np.uint8)
    Image.fromarray(noise).resize((640, 427)).save(tmp_path / "noise.png")
    made = [
        photos.encoded(recipe(4, width=500, height=375), each, number)
        for each in (sources, [tmp_path / "noise.png"])
        for number in range(4)
    ]
    assert all(34_000 < len(data) < 63_000 for data in made)
    assert {Image.open(io.BytesIO(data)).size for data in made} == {(500, 375)}


def test_a_folder_is_used_again_and_checked(pictures: list[Path], tmp_path: Path) -> None:
    """Files that are as they were made stay; a changed one has all made again; other recipes and files are refused."""
    said: list[str] = []
    source = photo(tmp_path / "photo.png")
    files = photos.provide(tmp_path / "jpeg", recipe(3), [source], said.append)
    before = [file.stat().st_mtime_ns for file in files]
    assert photos.provide(tmp_path / "jpeg", recipe(3), [source], said.append) == files
    assert [file.stat().st_mtime_ns for file in files] == before
    files[1].write_bytes(b"")
    photos.provide(tmp_path / "jpeg", recipe(3), [source], said.append)
    assert files[1].stat().st_size > 0
    assert "was changed" in said[1]
    with pytest.raises(UsageError, match="holds other JPEGs than these settings give"):
        photos.provide(tmp_path / "jpeg", recipe(4), [source], said.append)
    with pytest.raises(UsageError, match="this command did not make it"):
        photos.provide(tmp_path, recipe(4), [source], said.append)


def test_photographs_are_those_that_packages_ship(tmp_path: Path) -> None:
    """Without a folder they are looked for in the packages; an empty folder is refused."""
    assert {path.name for path in photos.sources()} <= set(photos.NAMES)
    with pytest.raises(UsageError, match=r"--photos: .* holds no \.png"):
        photos.sources(tmp_path)


def test_dropping_files_from_the_page_cache(tmp_path: Path) -> None:
    """What was read is cached, what was dropped is not; the words say what came of it, not what was asked for."""
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_bytes(bytes(100_000))
    assert page_cache.arrange(files, uncached=False) == "cached"
    page_cache.drop(files)
    share = page_cache.share(files)
    assert share in (0.0, 1.0)  # 1.0 on a tmpfs, whose files are nowhere else
    assert page_cache.in_words(share, wanted_cached=False).startswith("uncached" if share == 0 else "could not be")
    assert page_cache.in_words(0.5, wanted_cached=True) == "50% cached"


def test_a_kernel_that_does_not_say_what_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on, and its rows say that nothing was checked."""

    def refuse(_: object) -> float:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(page_cache, "share", refuse)
    (tmp_path / "a").write_bytes(b"a")
    assert page_cache.arrange([tmp_path / "a"], uncached=True) == "dropped, not checked: Function not implemented"


# ---- what is asked for


def test_systems_and_settings_by_name() -> None:
    """Groups and names of systems; settings as BATCH or BATCH/WORKERS; mistakes say what is expected."""
    assert systems_of("ours") == (System.OURS_GPU, System.OURS_CPU)
    assert systems_of("ray-data,loops,ray-data")[0] is System.RAY
    assert System.RAY not in systems_of("loops")
    assert fixed_of(["gpu-decode=256/0", "ours-cpu-decode=64"]) == {
        System.GPU_DECODE: Setting(batch_size=256, workers=0),
        System.OURS_CPU: Setting(batch_size=64),
    }
    for text in ("gpu-decode", "gpu-decode=0", "gpu-decode=64/", "spark=64"):
        with pytest.raises(UsageError, match="SYSTEM=BATCH"):
            fixed_of([text])
    with pytest.raises(UsageError, match="unknown system 'spark'"):
        systems_of("spark")
    assert size_of("500x375") == (500, 375)
    for text in ("500", "500x", "x375", "4x375"):
        with pytest.raises(UsageError, match="WIDTHxHEIGHT"):
            size_of(text)


def test_what_is_tried_for_a_system() -> None:
    """All combinations for a loop, batch sizes alone for ours, one setting where it was fixed."""
    fixed = {System.RAY: Setting(batch_size=32, workers=4)}
    asked = Wanted(models=("resnet50",), batch_sizes=(64, 128), workers=(8, 16), fixed=fixed)
    request = ScoringRequest(asked=asked, model="resnet50", dtype="fp16", side=224, device="cuda", cpus=16)
    assert len(request.settings(System.EAGER)) == 4
    assert [str(s) for s in request.settings(System.OURS_CPU)] == ["batch 64", "batch 128"]
    assert request.settings(System.RAY) == [Setting(batch_size=32, workers=4)]
    usual = dataclasses.replace(request, asked=dataclasses.replace(asked, workers=None, batch_sizes=(64,)))
    assert [s.workers for s in usual.settings(System.EAGER)] == [8, 16]
    assert [s.workers for s in usual.settings(System.GPU_DECODE)] == [0, 4, 8]


# ---- loops


@pytest.mark.parametrize("system", BY_HAND)
def test_a_loop_has_at_most_forty_lines(system: System) -> None:
    """Blank ones not counted. It starts no thread, and makes no stream but one that decode_jpeg needs to be right."""
    text = (SOURCES / f"{system.loop}.py").read_text()
    assert sum(bool(line.strip()) for line in text.splitlines()) <= 40
    assert not any(word in text for word in ("threading", "concurrent", "multiprocessing"))
    assert text.count("Stream(") == (system is System.GPU_DECODE)


@pytest.mark.parametrize("loop", LOOPS)
def test_loops_give_the_model_the_same_pixels(
    loop: object, pictures: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each writes every file once, with the answer for its pixels; a short last batch too."""
    monkeypatch.setattr(torch, "compile", lambda function=None, **_: function or (lambda f: f))
    # a CPU has no streams; torch.cuda.stream(None) does nothing
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, stream: None)
    check_answers(
        loop,
        pictures,
        tmp_path / "out.parquet",
        dtype=torch.float32,
        device="cpu",
        side=24,
        workers=0,
        mode="default",
        within=0.01,
    )


# ---- processes


def test_a_process_that_fails_or_takes_too_long(tmp_path: Path) -> None:
    """The reason is its last line, or the limit; what it has printed is kept either way."""
    log = tmp_path / "log"
    failed = process.run(
        [sys.executable, "-c", "import sys; print('said'); sys.exit('no luck')"],
        log=log,
        limit_s=60,
        start=prefork.start,
    )
    assert (failed.error, failed.out) == ("ended with exit code 1: no luck", "said\n")
    slow = process.run(
        [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(600)"],
        log=log,
        limit_s=0.5,
        start=prefork.start,
    )
    assert slow.error == "over the time limit of 0.5 s"


# ---- all of it


def shop(folder: Path) -> Workshop:
    for name in ("work", "home"):
        (folder / name).mkdir(mode=0o700)
    return Workshop(folder=folder / "work", home=folder / "home", log=folder / "log", limit_s=120, start=prefork.start)


def test_a_whole_run_without_a_gpu(pictures: list[Path], tmp_path: Path) -> None:
    """Ours and a loop answer alike; systems that need a GPU say so."""
    wanted = Wanted(
        models=("mobilenet_v3_small",),
        systems=tuple(system for system in System if system is not System.RAY),
        files=pictures[0].parent,
        count=20,
        size=(64, 48),
        photos=tmp_path,
        side=32,
        rounds=1,
        batch_sizes=(8,),
        workers=(0,),
        device="cpu",
    )
    (tmp_path / "photo.png").write_bytes((pictures[0].parents[1] / "photo.png").read_bytes())
    found = measure(wanted, shop(tmp_path))
    rows = {row.system: row for row in found.rows}
    for system, why in WITHOUT_GPU.items():
        assert rows[system].error == why
    ours, loop = rows[System.OURS_CPU], rows[System.EAGER]
    assert (ours.error, loop.error) == (None, None)
    assert ours.facts["hit"] == "stored"
    assert ours.facts["decode"]["by"] == "cpu"
    assert (ours.files, ours.records, found.environment["top1_reference"]) == ("cached", 20, "dataloader-eager")
    assert ours.same_top1 is not None
    assert ours.same_top1 >= 0.5  # of twenty pictures, by random weights that hardly tell them apart
    assert ours.wall_s is not None
    assert ours.wall_s > ours.trials[0].run_s


def test_all_systems_score_the_same_files(pictures: list[Path], tmp_path: Path) -> None:
    """What a job takes: subfolders, suffixes of any case, equal names in two folders; others are passed over."""
    folder = tmp_path / "classes"
    for number, name in enumerate(("cat/0.jpg", "cat/1.JPG", "dog/0.jpg", "2.JPEG", "cat/readme.txt")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(pictures[number].read_bytes())
    wanted = Wanted(
        models=("mobilenet_v3_small",),
        systems=(System.OURS_CPU, System.EAGER),
        files=folder,
        side=32,
        rounds=1,
        batch_sizes=(4,),
        workers=(0,),
        device="cpu",
    )
    ours, loop = measure(wanted, shop(tmp_path)).rows
    assert (ours.error, loop.error) == (None, None)
    assert (ours.records, loop.records) == (4, 4)
    assert ours.same_top1 is not None
    assert ours.same_top1 > 0.5  # as above; a file that only one of them has would count as a difference


def test_a_folder_without_pictures_is_refused(tmp_path: Path) -> None:
    """The message says what is expected."""
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "notes.txt").write_text("")
    photo(tmp_path / "photo.png")
    at = shop(tmp_path)
    for folder in (tmp_path / "given", tmp_path / "given" / "notes.txt"):
        with pytest.raises(UsageError, match=r"holds no pictures, .* expected a folder of JPEGs"):
            measure(Wanted(models=("mobilenet_v3_small",), files=folder, photos=tmp_path), at)


def test_pictures_that_not_all_systems_decode_are_refused(tmp_path: Path) -> None:
    """Before anything is measured, by name."""
    (tmp_path / "given" / "dog").mkdir(parents=True)
    photo(tmp_path / "given" / "dog" / "a.png")
    with pytest.raises(UsageError, match=r"dog/a\.png is no JPEG; expected JPEGs alone"):
        measure(Wanted(models=("mobilenet_v3_small",), files=tmp_path / "given"), shop(tmp_path))


def test_arrays_against_the_bare_replay(tmp_path: Path) -> None:
    """A model of the zoo's or of torchvision's over an npy: both rates, and their share."""
    wanted = Wanted(
        models=("mobilenet_v3_small",),
        format="npy",
        files=tmp_path / "arrays",
        count=32,
        side=32,
        rounds=1,
        batch_sizes=(8,),
        device="cpu",
    )
    [found] = measure(wanted, shop(tmp_path)).rows
    assert found.error is None
    assert found.bare_records_per_s is not None
    assert found.records_per_s is not None
    assert found.of_bare == pytest.approx(found.records_per_s / found.bare_records_per_s)
    assert np.load(tmp_path / "arrays" / "uint8-32x32x32x3.npy").dtype == np.uint8
