"""Which pictures reach the GPU's JPEG engines, over a stand-in for nvJPEG; tests/gpu decodes with the real one."""

# ruff: noqa: N802  # nvJPEG's names

from __future__ import annotations

import ctypes
import gc
import itertools
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nimble_jobs.decoding.recipe import Recipe
from nimble_jobs.engine import jpeg_engines, pictures
from nimble_jobs.engine.jpeg_engines import BROKEN, OTHERS, TAKES, JpegEngines
from nimble_jobs.engine.pictures import PictureDecoder

SIZE = (30, 40)  # height, width that all headers are said to give


class Library:
    """What nvJPEG says of a file, by its address."""

    def __init__(self, **answers: Any) -> None:
        self.answers = {"info": 0, "size": SIZE, "sampling": 2, "header": 0, "supported": 0, "refused": 0} | answers
        self.prepared: list[int] = []
        self.given: tuple[Any, ...] = ()
        self.status = 0

    def nvjpegGetImageInfo(
        self, handle: Any, at: Any, length: Any, components: Any, sampling: Any, w: Any, h: Any
    ) -> int:
        h[0], w[0] = self.answers["size"]
        sampling._obj.value = self.answers["sampling"]
        return int(self.answers["info"])

    def nvjpegJpegStreamParseHeader(self, handle: Any, at: Any, length: Any, parsed: Any) -> int:
        return int(self.answers["header"])

    def nvjpegDecodeBatchedSupported(self, handle: Any, parsed: Any, refused: Any) -> int:
        refused._obj.value = self.answers["refused"]
        return int(self.answers["supported"])

    def nvjpegDecodeBatchedInitialize(self, handle: Any, state: Any, count: int, threads: int, form: int) -> int:
        self.prepared.append(count)
        return 0

    def nvjpegDecodeBatched(self, handle: Any, state: Any, files: Any, lengths: Any, images: Any, stream: Any) -> int:
        self.given = files, lengths, images
        return self.status


def engines(library: Library) -> JpegEngines:
    made = object.__new__(JpegEngines)
    made.channels = 3
    made.__dict__ |= {
        "_library": library,
        "_quick": library,
        "_handle": 0,
        "_state": 0,
        "_parsed": 0,
        "_format": 3,
        "_known": {},
    }
    return made


@pytest.mark.parametrize(
    ("answers", "verdict"),
    [
        ({}, TAKES),
        ({"info": 3}, BROKEN),
        ({"size": (31, 40)}, BROKEN),
        ({"size": (30, 41)}, BROKEN),
        ({"sampling": -1}, BROKEN),
        ({"header": 3}, BROKEN),
        ({"refused": 1}, OTHERS),
        ({"supported": 2}, OTHERS),
    ],
)
def test_only_what_the_engines_take_reaches_them(answers: dict[str, Any], verdict: int) -> None:
    """One whose size is not what there is room for never does."""
    files = np.array([1, 2]), np.array([10, 20]), np.array([SIZE, SIZE]), np.array([-1, 7])
    assert engines(Library(**answers)).judge(*files).tolist() == [verdict, verdict]


def test_one_header_is_read_for_all_that_are_alike() -> None:
    """Those that promise nothing are read one by one."""
    library = Library()
    asked: list[int] = []
    ask = library.nvjpegGetImageInfo
    library.nvjpegGetImageInfo = lambda handle, at, *more: asked.append(at.value) or ask(handle, at, *more)  # type: ignore[method-assign,func-returns-value]
    made = engines(library)
    sizes, alike = np.array([SIZE] * 6), np.array([5, 5, -1, 9, -1, 5])
    assert made.judge(np.arange(1, 7), np.full(6, 10), sizes, alike).tolist() == [TAKES] * 6
    assert asked == [1, 3, 4, 5]
    library.answers["refused"] = 1
    assert made.judge(np.arange(1, 4), np.full(3, 10), sizes[:3], np.array([9, 3, 5])).tolist() == [
        TAKES,
        OTHERS,
        TAKES,
    ]
    assert asked == [1, 3, 4, 5, 2]


def test_a_decoder_keeps_a_bounded_number_of_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jpeg_engines, "_MOST_KNOWN", 3)
    made = engines(Library())
    for first in range(1, 20, 2):
        made.judge(np.array([1, 2]), np.array([10, 20]), np.array([SIZE, SIZE]), np.array([first, first + 1]))
        assert 1 <= len(made._known) <= 3


def test_each_batch_is_prepared_and_a_failure_is_raised_with_its_status() -> None:
    library = Library()
    files = np.array([1, 2]), np.array([10, 20]), np.array([SIZE, SIZE]), np.array([100, 4000])
    engines(library).decode(*files, 0)
    library.status = 5
    with pytest.raises(RuntimeError, match=r"failed to decode a batch: 5$"):
        engines(library).decode(*files, 0)
    assert library.prepared == [2, 2]


def test_what_the_library_was_given_lives_on() -> None:
    """Its threads may read it after the call, until the stream is done."""
    library = Library()
    made = engines(library)
    made.decode(np.array([1, 2]), np.array([10, 20]), np.array([SIZE, SIZE]), np.array([100, 4000]), 0)
    gc.collect()
    others = [np.full((2, 2, 4), 9) for _ in range(100)]  # would lie where freed arrays lay
    sizes = 2, 2, 16
    given = zip(library.given, sizes, strict=True)
    files, lengths, images = ((ctypes.c_int64 * count).from_address(at.value) for at, count in given)
    assert (list(files), list(lengths)) == ([1, 2], [10, 20])
    assert list(images) == [100, 1300, 2500, 0, 40, 40, 40, 0, 4000, 5200, 6400, 0, 40, 40, 40, 0]
    assert len(others) == 100


def test_a_torchvision_without_nvjpeg_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(jpeg_engines.NoEngines, match="torchvision is not installed"):
        jpeg_engines._libraries.__wrapped__()


def test_a_gpu_without_engines_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoders ask for engines in every batch."""
    asked: list[int] = []

    def none(_device: object, channels: int) -> JpegEngines:
        asked.append(channels)
        raise jpeg_engines.NoEngines("no engines")

    monkeypatch.setattr(jpeg_engines, "JpegEngines", none)
    monkeypatch.setattr(jpeg_engines, "_WITHOUT", set())
    gpu = torch.device("cuda", 7)
    assert [jpeg_engines.take(gpu, channels) for channels in (3, 3, 1, 3)] == [None] * 4
    assert asked == [3, 1]


def test_only_engines_whose_work_is_done_are_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error they may still be at work, and a state that failed once may never finish."""
    left: list[object] = []
    names = itertools.count()
    monkeypatch.setattr(jpeg_engines, "take", lambda *_: f"engines {next(names)}")
    monkeypatch.setattr(jpeg_engines, "give_back", left.append)
    decoder = PictureDecoder(torch.device("cpu"), Recipe(channels=3, size=(8, 8), resize=(8, 8)))
    assert decoder._engines == "engines 0"  # before a job's clock starts
    monkeypatch.setattr(pictures, "able", lambda _: SimpleNamespace(streams=True))
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    monkeypatch.setattr(decoder, "_stream", "stream")

    def fails() -> None:
        assert decoder._engines == "engines 0"
        raise MemoryError

    with pytest.raises(MemoryError), decoder._at_work():
        fails()
    assert (left, decoder._engines) == ([], None)
    with decoder._at_work():
        pass
    assert (left, decoder._engines) == (["engines 1"], None)
