"""The specs and the data of the quick start fit each other."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

from nimble_jobs.data import open_reader
from nimble_jobs.spec import load

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data, written to a folder of its own, twice: the second time changes nothing."""
    folder = tmp_path_factory.mktemp("data")
    script = runpy.run_path(str(ROOT / "scripts" / "quickstart_data.py"))
    for _ in range(2):
        for write in ("digits", "photos"):
            script[write](folder)
    return folder


def arrays(path: Path) -> dict[str, np.ndarray]:
    """Everything that an archive holds."""
    with np.load(path) as archive:
        return dict(archive)


def test_the_split_is_fixed_and_without_overlap(data: Path) -> None:
    """1,437 scans to train on, 360 held out, none in both, every class in both."""
    train, held_out = (arrays(data / f"digits-{part}.npz") for part in ("train", "held-out"))
    assert (len(train["ids"]), len(held_out["ids"])) == (1437, 360)
    assert not set(train["ids"]) & set(held_out["ids"])
    assert set(train["labels"]) == set(held_out["labels"]) == set(range(10))
    assert list(held_out["ids"][:3]) == ["digit-0360", "digit-1773", "digit-1482"]


@pytest.mark.parametrize(
    ("name", "total", "shape"),
    [("digits-train", 1437, (3, 32, 32)), ("digits-score", 360, (3, 32, 32)), ("photos", 16, (3, 224, 224))],
)
def test_the_specs_read_the_data(data: Path, name: str, total: int, shape: tuple[int, ...]) -> None:
    """Each spec is valid, and finds its records in the shape that its model takes."""
    spec = load(ROOT / "jobs" / f"{name}.yaml", check_files=False)
    moved = spec.input.model_copy(update={"source": str(data / Path(spec.input.source).name)})
    with open_reader(moved) as reader:
        assert (reader.total, reader.signature.shape) == (total, shape)
        batch = next(iter(reader.batches(batch_size=2)))
    assert batch.x.shape == (2, *shape)
    assert not batch.bad
