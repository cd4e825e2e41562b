"""What is done to records between the file and the model."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from nimble_jobs.data.transform import bind, resize
from nimble_jobs.errors import DataError
from nimble_jobs.spec.transform import TransformSpec


def run(raw: np.ndarray, **options: object) -> np.ndarray:
    transform = bind(TransformSpec(**options), raw.shape[1:], raw.dtype, "d.npy")  # type: ignore[arg-type]
    out = transform(raw)
    assert out.shape == (len(raw), *transform.signature.shape)
    assert out.dtype == transform.signature.dtype
    assert out.flags.c_contiguous
    return out


sizes = st.tuples(st.integers(1, 40), st.integers(1, 40))


@settings(max_examples=60, deadline=None)
@given(old=sizes, new=sizes, seed=st.integers(0, 9))
def test_resizing_is_pillows_bilinear_with_antialiasing(old: tuple[int, int], new: tuple[int, int], seed: int) -> None:
    """Enlarging and reducing give what Pillow gives for a float image."""
    x = np.random.default_rng(seed).normal(size=(2, 1, *old)).astype(np.float32)
    wanted = [np.asarray(Image.fromarray(i[0]).resize(new[::-1], Image.Resampling.BILINEAR)) for i in x]
    np.testing.assert_allclose(resize(x, *new)[:, 0], np.stack(wanted), atol=2e-5)


def test_resizing_many_small_images_takes_a_blink() -> None:
    """1,797 images of 8x8 become 32x32 with three channels in well under a second of a core."""
    x = np.random.default_rng(0).integers(0, 17, size=(1797, 8, 8), dtype=np.uint8)
    start = time.process_time()
    assert run(x, resize=(32, 32), channels=3).shape == (1797, 3, 32, 32)
    assert time.process_time() - start < 0.8


@pytest.mark.parametrize(
    ("shape", "layout", "out"),
    [
        ((6, 5, 3), None, (3, 6, 5)),
        ((6, 5, 4), None, (4, 6, 5)),
        ((3, 6, 5), None, (3, 6, 5)),
        ((3, 6, 3), None, (3, 6, 3)),
        ((3, 6, 3), "hwc", (3, 3, 6)),
        ((16, 6, 5), None, (16, 6, 5)),
        ((16, 6, 5), "hwc", (5, 16, 6)),
    ],
)
def test_layout_is_guessed_or_said(shape: tuple[int, ...], layout: str | None, out: tuple[int, ...]) -> None:
    """Three axes are CHW or HWC by where 1, 3 or 4 stands; `layout` overrides the guess."""
    x = np.random.default_rng(0).normal(size=(2, *shape)).astype(np.float32)
    got = run(x, layout=layout)
    assert got.shape[1:] == out
    np.testing.assert_array_equal(got, x if out == shape and layout is None else x.transpose(0, 3, 1, 2))


def test_arrays_that_are_no_images_keep_their_shape_and_kind() -> None:
    """Token ids stay whole, features become float32, and single-valued options still apply."""
    tokens = np.arange(12, dtype=np.int32).reshape(3, 4)
    assert run(tokens).dtype == np.int64
    np.testing.assert_array_equal(run(tokens), tokens)
    assert run(tokens, scale=0.5).dtype == np.float32
    features = np.arange(12, dtype=">f8").reshape(3, 4)
    np.testing.assert_array_equal(run(features, mean=(1.0,), std=(2.0,)), ((features - 1) / 2).astype(np.float32))
    np.testing.assert_array_equal(
        run(features, mean=(0.0, 1.0, 2.0, 3.0)), (features - np.arange(4)).astype(np.float32)
    )
    assert run(np.zeros((3, 7, 5), np.float32)[:, 0]).shape == (3, 5)
    assert run(np.zeros((3, 7, 5), np.float32)).shape == (3, 7, 5)  # two axes and no option of images: a sequence
    assert run(np.array([True, False])).dtype == np.int64


def test_the_input_is_never_written_to() -> None:
    """Arithmetic happens on a copy, also where the stored array is float32 already."""
    x = np.ones((2, 3, 4, 4), np.float32)
    x.flags.writeable = False
    np.testing.assert_array_equal(run(x, mean=(1.0,)), np.zeros_like(x))


@pytest.mark.parametrize(("have", "want"), [(1, 3), (3, 1), (4, 3), (4, 1)])
def test_channels_are_repeated_weighted_or_dropped(have: int, want: int) -> None:
    """One channel is repeated, three are weighted as Pillow weights them, alpha is dropped."""
    x = np.random.default_rng(0).integers(0, 256, size=(2, 6, 5, have), dtype=np.uint8)
    got = run(x, channels=want, layout="hwc")
    images = [Image.fromarray(i.squeeze()) for i in x]
    images = [i.convert("RGB") if i.mode == "RGBA" else i for i in images]
    wanted = np.stack([np.asarray(i.convert("L" if want == 1 else "RGB")).reshape(6, 5, want) for i in images])
    assert np.abs(got * 255 - wanted.transpose(0, 3, 1, 2)).max() < 0.51


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "message"),
    [
        ((4,), "f4", {"resize": (2, 2)}, r"records have shape \(4,\); transform.resize expects"),
        ((4,), "O", {}, "holds Python objects; expected numbers"),
        ((4,), "U3", {}, "holds text; expected numbers"),
        ((4,), "c8", {}, "holds complex numbers; expected numbers"),
        ((8, 8), "u1", {"center_crop": (9, 2)}, "images of 8x8 are smaller than transform.center_crop 9x2"),
        ((2, 8, 8), "f4", {"channels": 3}, "images have 2 channels; transform.channels 3 expects"),
        ((3, 8, 8), "f4", {"mean": (0.1, 0.2)}, "transform.mean has 2 values; expected 1 or 3"),
        ((8, 8), "u1", {"std": (0.1, 0.2, 0.3)}, "transform.std has 3 values; expected 1 or 1"),
    ],
)
def test_what_cannot_be_applied_is_refused(
    shape: tuple[int, ...], dtype: str, options: dict[str, object], message: str
) -> None:
    """A transform that does not fit the records is an error that names both."""
    with pytest.raises(DataError, match=f"d.npy: {message}"):
        bind(TransformSpec(**options), shape, np.dtype(dtype), "d.npy")  # type: ignore[arg-type]
