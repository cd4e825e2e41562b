"""Random parts of pictures: a function of seed, epoch, record and size alone, within the picture, spread as asked."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nimble_jobs.chance import RandomCrops, below, draws, unit


def crops(**given_: object) -> RandomCrops:
    return RandomCrops(**{"seed": 3, "epoch": 1, "scale": (0.08, 1.0), "ratio": (0.75, 1.3333), **given_})  # type: ignore[arg-type]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_parts_lie_within_their_pictures(data: st.DataObject) -> None:
    """Whatever the picture's size and the ranges; the same alone as among others."""
    n = data.draw(st.integers(1, 6))
    sizes = np.array(data.draw(st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 3000)), min_size=n, max_size=n)))
    least = data.draw(st.floats(0.001, 1))
    low = data.draw(st.floats(0.01, 100))
    given_ = crops(
        seed=data.draw(st.integers(0, 2**70)),
        epoch=data.draw(st.integers(1, 99)),
        scale=(least, data.draw(st.floats(least, 1))),
        ratio=(low, data.draw(st.floats(low, 100))),
    )
    indexes = np.array(data.draw(st.lists(st.integers(0, 10**7), min_size=n, max_size=n)))
    found = given_.rectangles(indexes, sizes)
    assert (found.dtype, found.shape) == (np.int32, (n, 4))
    assert (found[:, :2] >= 0).all()
    assert (found[:, 2:] >= 1).all()
    assert (found[:, :2] + found[:, 2:] <= sizes).all()
    alone = [given_.rectangles(indexes[i : i + 1], sizes[i : i + 1])[0].tolist() for i in range(n)]
    assert alone == found.tolist()


def test_areas_ratios_and_places_are_spread() -> None:
    """Area evenly between its bounds, the ratio's logarithm too, and every place equally likely."""
    n = 20_000
    found = crops(scale=(0.2, 0.5), ratio=(0.5, 2.0)).rectangles(np.arange(n), np.full((n, 2), 1000)).astype(float)
    areas, ratios = found[:, 2] * found[:, 3] / 1e6, np.log(found[:, 3] / found[:, 2])
    for values, (low, high) in ((areas, (0.2, 0.5)), (ratios, (math.log(0.5), math.log(2.0)))):
        counts, _ = np.histogram(values, bins=10, range=(low, high))
        assert counts.sum() > 0.999 * n
        assert (abs(counts - n / 10) < 200).all()
    places = found[:, :2] / (1000 - found[:, 2:] + 1)
    for axis in (0, 1):
        counts, _ = np.histogram(places[:, axis], bins=10, range=(0, 1))
        assert (abs(counts - n / 10) < 200).all()
    assert abs(np.corrcoef(places.T)[0, 1]) < 0.02


def test_epochs_seeds_and_records_differ() -> None:
    sizes = np.full((100, 2), 400)
    first = crops().rectangles(np.arange(100), sizes)
    others = [
        crops(epoch=2).rectangles(np.arange(100), sizes),
        crops(seed=4).rectangles(np.arange(100), sizes),
        crops().rectangles(np.arange(1, 101), sizes),
    ]
    assert all((other != first).any(axis=1).mean() > 0.98 for other in others)


def test_a_picture_in_which_no_try_fits() -> None:
    """The largest part in the middle whose ratio is allowed: a ribbon has no part of three quarters of its area."""
    found = crops(scale=(0.9, 1.0)).rectangles(np.arange(2), np.array([[10, 1000], [1000, 9]]))
    assert found.tolist() == [[0, 493, 10, 13], [494, 0, 12, 9]]


def test_other_processes_choose_the_same() -> None:
    """Processes that decode choose for themselves."""
    code = (
        "import numpy as np\n"
        "from nimble_jobs.chance import RandomCrops\n"
        "found = RandomCrops(seed=3, epoch=1, scale=(0.08, 1.0), ratio=(0.75, 1.3333))\n"
        "print(found.rectangles(np.arange(50), np.full((50, 2), 333)).tolist())\n"
    )
    there = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert there.strip() == str(crops().rectangles(np.arange(50), np.full((50, 2), 333)).tolist())


def test_known_words() -> None:
    """Trainings that are resumed by a later version must draw the same."""
    words = draws(0, 1, np.array([0, 5]), 2)
    assert words.tolist() == draws(0, 1, np.array([0, 5]), 7)[:, :2].tolist()
    assert hex(int(words[1, 1])) == "0x46107e13299546aa"
    assert below(words, np.array([1, 2**31])).max(axis=0).tolist()[0] == 0
    assert ((unit(words) >= 0) & (unit(words) < 1)).all()
