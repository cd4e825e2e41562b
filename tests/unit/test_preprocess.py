"""What is done to stored records on the device: the same numbers as on the host, and a value that says what it is."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from nimble_jobs.data.finite import not_finite
from nimble_jobs.data.transform import ArrayTransform, bind, on_host
from nimble_jobs.engine.inputs import draw
from nimble_jobs.models.preprocessed import Preprocessed, crossing_dtype
from nimble_jobs.preprocess import BITS, FLOATS, Preprocess, bits, of_words
from nimble_jobs.spec.transform import TransformSpec
from tests.strategies import stored_batches, stored_transforms

CPU = torch.device("cpu")
ROUNDING = float(np.finfo(np.float32).eps)


class Echo(nn.Module):
    """Returns what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def bound(transform: tuple[TransformSpec, tuple[int, ...], str]) -> ArrayTransform:
    spec, shape, dtype = transform
    return bind(spec, shape, np.dtype(dtype), "x.npy")


def made(steps: Preprocess, stored: np.ndarray, model: nn.Module | None = None) -> torch.Tensor:
    """What the module makes of a batch in place of a device."""
    module = Preprocessed(model or Echo(), steps, torch.float32, CPU)
    x = module(torch.from_numpy(bits(np.ascontiguousarray(stored))))
    assert isinstance(x, torch.Tensor)
    return x


@settings(max_examples=150, deadline=None)
@given(transform=stored_transforms(), data=st.data())
def test_the_device_makes_what_the_host_makes(
    transform: tuple[TransformSpec, tuple[int, ...], str], data: st.DataObject
) -> None:
    """Equal bits for every stored type and layout; after a resize or a change to grey, equal but for rounding."""
    host = bound(transform)
    assume(host.preprocess is not None)
    assert host.preprocess is not None
    stored = data.draw(stored_batches(transform[1], transform[2]))
    wanted = host(stored)
    found = made(host.preprocess, stored).numpy()
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert np.array_equal(on_host(host.preprocess, stored), wanted)
    grey = (
        host.preprocess.channels == 1 and host.preprocess.layout is not None and transform[1] != host.preprocess.result
    )
    if host.preprocess.resize is None and not grey:
        assert np.array_equal(found, wanted)
    else:
        assert host.preprocess.scale is not None
        smallest = min(map(abs, host.preprocess.std or (1.0,)))
        largest = float(np.abs(stored.astype(np.float64)).max()) * host.preprocess.scale
        largest += max(map(abs, host.preprocess.mean or (0.0,)))
        side = max(1, *transform[1][:3])
        assert np.abs(found - wanted).max() <= 2 * side * ROUNDING * largest / smallest


@settings(max_examples=150, deadline=None)
@given(transform=stored_transforms())
def test_words_and_json_lose_nothing(transform: tuple[TransformSpec, tuple[int, ...], str]) -> None:
    """A value can be made again from its words, which stand in keys, and from JSON."""
    steps = bound(transform).preprocess
    assume(steps is not None)
    assert steps is not None
    assert of_words(steps.shape, steps.dtype, steps.words) == steps
    assert Preprocess.of_json(json.loads(json.dumps(steps.to_json()))) == steps


@pytest.mark.parametrize(
    ("spec", "shape", "dtype", "words"),
    [
        (
            {"resize": (224, 224), "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)},
            (500, 375, 3),
            "uint8",
            "hwc, resize 224x224, /255, mean 0.485 0.456 0.406, std 0.229 0.224 0.225",
        ),
        ({"resize": (8, 8), "center_crop": (8, 8), "channels": 3}, (3, 8, 8), "uint8", "chw, /255"),
        ({"center_crop": (6, 6), "channels": 3, "scale": 0.5}, (8, 8), "int16", "hw, crop 6x6, 3 channels, *0.5"),
        ({}, (12,), "int32", "whole numbers"),
        ({}, (12,), "float16", "as stored"),
    ],
)
def test_words_are_readable(spec: dict[str, object], shape: tuple[int, ...], dtype: str, words: str) -> None:
    """A step that changes nothing is not spoken of."""
    steps = bind(TransformSpec(**spec), shape, np.dtype(dtype), "x").preprocess  # type: ignore[arg-type]
    assert steps is not None
    assert steps.words == words


@pytest.mark.parametrize(
    ("shape", "dtype", "words", "said"),
    [
        ((3, 8, 8), "uint8", "chw, rotate 3", "no step of a preprocessing: 'rotate 3'"),
        ((8, 8), "uint8", "chw, /255", "records of shape"),
        ((3, 8, 8), "complex64", "chw", "no type in which records cross: 'complex64'"),
        ((8,), "uint8", "mean a b", "could not convert"),
    ],
)
def test_other_words_are_refused(shape: tuple[int, ...], dtype: str, words: str, said: str) -> None:
    """A key that somebody else wrote makes no value."""
    with pytest.raises(ValueError, match=said):
        of_words(shape, dtype, words)


@pytest.mark.parametrize(
    ("spec", "shape", "dtype"),
    [
        ({}, (8,), ">f4"),  # the other byte order
        ({}, (8,), "uint64"),
        ({"std": (1e-40,)}, (3, 8, 8), "uint8"),
        ({"scale": 1e38}, (3, 8, 8), "uint8"),
        ({"resize": (8, 8)}, (3, 600, 8), "uint8"),  # reduced further than the device's kernel can
    ],
)
def test_what_only_the_host_can_do_does_not_cross(spec: dict[str, object], shape: tuple[int, ...], dtype: str) -> None:
    """Types that torch lacks, numbers that may overflow, images that shrink too far."""
    assert bind(TransformSpec(**spec), shape, np.dtype(dtype), "x").preprocess is None  # type: ignore[arg-type]


@settings(max_examples=100, deadline=None)
@given(
    dtype=st.sampled_from(["float16", "float32", "float64"]),
    odd=st.lists(st.sampled_from([np.nan, np.inf, -np.inf, 6e4, 3e38, 1e300, -1e39, 1.0]), min_size=1, max_size=6),
    scale=st.sampled_from([1.0, 1e3, 1e-3]),
    std=st.sampled_from([None, (0.01,), (5.0,)]),
)
def test_the_same_records_are_bad(dtype: str, odd: list[float], scale: float, std: tuple[float, ...] | None) -> None:
    """NaN, Inf and what overflows in the arithmetic: with the same reasons, whoever does the arithmetic."""
    host = bind(TransformSpec(scale=scale, std=std), (3,), np.dtype(dtype), "x")
    assert host.preprocess is not None
    with np.errstate(over="ignore"):
        stored = np.ones((len(odd), 3)).astype(dtype)
        stored[:, 1] = np.array(odd).astype(dtype)
    assert not_finite(stored, host.preprocess) == not_finite(host(stored), None)
    bad = np.flatnonzero(~np.isfinite(host(stored)).all(axis=1)).tolist()
    assert list(not_finite(stored, host.preprocess)) == bad


@settings(max_examples=100, deadline=None)
@given(transform=stored_transforms(), scale=st.sampled_from([1.0, 1e-6, 1e4, 0.0, -100.0]))
def test_random_records_can_be_scored(transform: tuple[TransformSpec, tuple[int, ...], str], scale: float) -> None:
    """They lie in the range of the stored type, and become finite numbers."""
    steps = bound(transform).preprocess
    assume(steps is not None)
    assert steps is not None
    assume(not steps.whole)
    kind = crossing_dtype(steps)
    drawn = draw((2, *steps.shape), kind, steps.usual, generator=torch.Generator().manual_seed(3), scale=scale)
    assert (drawn.dtype, tuple(drawn.shape)) == (kind, (2, *steps.shape))
    stored = drawn.numpy().view(steps.dtype)
    if steps.dtype in BITS:
        assert steps.usual.low <= int(stored.min()) <= int(stored.max()) <= steps.usual.high
    if scale == 1.0 or steps.dtype not in FLOATS:
        assert bool(torch.isfinite(made(steps, stored)).all())


def test_random_numbers_near_the_ends_of_their_type_stay_finite() -> None:
    """Normal numbers around 65,000, of which float16 holds those up to 65,504."""
    steps = Preprocess(shape=(1000,), dtype="float16", result=(1000,), layout="hw", scale=0.001, mean=(65.0,))
    drawn = draw((2, 1000), torch.float16, steps.usual, generator=torch.Generator().manual_seed(3))
    assert 60_000 < float(drawn.min()) < float(drawn.max()) == 65_504


def test_random_bytes_are_all_bytes() -> None:
    """Checks see dark, bright, and even images."""
    steps = Preprocess(shape=(64, 64, 3), dtype="uint8", result=(3, 64, 64), layout="hwc", scale=1 / 255)
    drawn = {
        scale: draw((4, 64, 64, 3), torch.uint8, steps.usual, generator=torch.Generator().manual_seed(1), scale=scale)
        for scale in (1.0, 1e-6, 1e4, 0.0)
    }
    assert (len(drawn[1.0].unique()), int(drawn[1.0].min()), int(drawn[1.0].max())) == (256, 0, 255)
    assert len(drawn[0.0].unique()) == 1
    assert len(drawn[1e-6].unique()) == 1
    assert sorted(drawn[1e4].unique().tolist()) == [0, 127, 255]


def test_random_columns_become_normal() -> None:
    """Each column of a table is drawn around its own mean, in its own width."""
    steps = bind(TransformSpec(mean=(1e6, 0.1), std=(1e3, 1e-4)), (2,), np.dtype("float64"), "x").preprocess
    assert steps is not None
    drawn = draw((4000, 2), torch.float64, steps.usual, generator=torch.Generator().manual_seed(1))
    found = on_host(steps, drawn.numpy())
    np.testing.assert_allclose(found.mean(axis=0), 0, atol=0.1)
    np.testing.assert_allclose(found.std(axis=0), 1, atol=0.1)


@pytest.mark.parametrize("layout", ["chw", "hwc"])
@pytest.mark.parametrize("resize", [None, (6, 5)])
def test_images_lie_as_the_weights_do(layout: str, resize: tuple[int, int] | None) -> None:
    """A model whose weights are channels-last gets its images so, whatever the layout of the records."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(3, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    shape = (3, 8, 8) if layout == "chw" else (8, 8, 3)
    steps = bind(TransformSpec(layout=layout, resize=resize), shape, np.dtype("uint8"), "x").preprocess  # type: ignore[arg-type]
    assert steps is not None
    stored, model = np.zeros((2, *shape), dtype=np.uint8), First()
    assert made(steps, stored, model).is_contiguous()
    model = model.to(memory_format=torch.channels_last)
    assert made(steps, stored, model).is_contiguous(memory_format=torch.channels_last)
