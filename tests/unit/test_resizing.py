"""What a resize is: weights that form a triangle, and one rounding."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from nimble_jobs.resizing import to_bytes, weights


@pytest.mark.parametrize(
    ("old", "new"), [(1, 1), (7, 7), (500, 224), (224, 500), (3, 1), (1, 5), (9, 3), (65_500, 8), (1000, 999)]
)
def test_weights_form_a_triangle_around_each_centre(old: int, new: int) -> None:
    """Written anew with fractions instead of whole numbers."""
    factor = old / new
    distance = np.abs(np.arange(old) + 0.5 - (np.arange(new)[:, None] + 0.5) * factor) / max(factor, 1.0)
    triangle = np.clip(1.0 - distance, 0.0, None)
    found = weights(old, new)
    assert found.shape == (new, old)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, triangle / triangle.sum(axis=1, keepdims=True), atol=1e-6)
    np.testing.assert_allclose(found.sum(axis=1), 1.0, atol=1e-5)


def test_an_equal_size_changes_nothing() -> None:
    np.testing.assert_array_equal(weights(9, 9), np.eye(9, dtype=np.float32))


def test_bytes_round_half_up_and_are_clamped() -> None:
    x = np.array([-3.0, 0.49, 0.5, 1.5, 2.5, 254.5, 300.0], dtype=np.float32)
    assert to_bytes(x).tolist() == [0, 0, 1, 2, 3, 255, 255]


def test_it_is_pillows_bilinear_but_for_one_rounding() -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (75, 100), dtype=np.uint8)
    for new in ((32, 40), (75, 33), (120, 150)):
        ours = to_bytes(weights(75, new[0]) @ x.astype(np.float32) @ weights(100, new[1]).T)
        pillows = np.asarray(Image.fromarray(x).resize(new[::-1], Image.Resampling.BILINEAR))
        assert np.abs(ours.astype(int) - pillows).max() <= 1
