"""Pictures of bytes are divided by 255, others are not: the two are never mixed without being asked for."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from nimble_jobs.data import open_reader
from nimble_jobs.errors import DataError
from nimble_jobs.spec.model import FieldsSpec, InputSpec
from nimble_jobs.spec.transform import TransformSpec
from tests.trainings import Attempt, lay_out, spec_of

PICTURES = np.random.default_rng(0).integers(0, 256, (4, 1, 8, 8), dtype=np.uint8)


def test_files_of_one_input(tmp_path: Path) -> None:
    """The error names both files and their types; a scale in the spec holds for both."""
    np.save(tmp_path / "a.npy", PICTURES)
    np.save(tmp_path / "b.npy", PICTURES.astype(np.float32))
    spec = InputSpec(source=str(tmp_path), format="npy")
    with pytest.raises(
        DataError,
        match=r"b\.npy: records are float32, taken as they are; expected uint8, divided by 255, as in .*a\.npy; "
        r"transform\.scale sets one scale for both",
    ):
        open_reader(spec)
    with open_reader(spec.model_copy(update={"transform": TransformSpec(scale=0.5)})) as reader:
        x = reader.take(np.arange(8)).x
    np.testing.assert_array_equal(x[:4], x[4:])
    np.save(tmp_path / "b.npy", PICTURES)
    with open_reader(spec) as reader:
        assert reader.total == 8


def test_encoded_pictures_are_bytes(tmp_path: Path) -> None:
    """They mix with stored bytes, and not with fractions."""
    file = io.BytesIO()
    Image.fromarray(PICTURES[0, 0]).save(file, "PNG")
    parquet.write_table(pa.table({"x": [file.getvalue()]}), tmp_path / "a.parquet")
    spec = InputSpec(
        source=str(tmp_path), format="parquet", fields=FieldsSpec(x="x"), transform=TransformSpec(channels=1)
    )
    for kind in (pa.uint8(), pa.float32()):
        column = pa.array([PICTURES[0].tolist()], type=pa.list_(pa.list_(pa.list_(kind))))
        parquet.write_table(pa.table({"x": column}), tmp_path / "b.parquet")
        if kind == pa.float32():
            with pytest.raises(DataError, match=r"b\.parquet: records are float32, taken as they are; expected uint8"):
                open_reader(spec)
            continue
        with open_reader(spec) as reader:
            x = reader.take(np.arange(2)).x
        np.testing.assert_array_equal(x[0], x[1])


def test_the_held_out_records_of_a_training(tmp_path: Path) -> None:
    """They are on the input's scale, or the training is refused."""
    lay_out(tmp_path)
    for name in ("train", "held-out"):
        with np.load(tmp_path / f"{name}.npz") as arrays:
            images, labels = arrays["images"][:, None], arrays["labels"]
        np.savez(tmp_path / f"{name}.npz", images=images, labels=labels)
    np.savez(tmp_path / "fractions.npz", images=images.astype(np.float32), labels=labels)
    source = str(tmp_path / "fractions.npz")
    spec = spec_of(tmp_path, schedule__on_miss="eager", train__validation={"source": source})
    said = (
        f"train.validation.source: {source}: records are float32, taken as they are; expected uint8, divided by 255, "
        f"as in {tmp_path}/train.npz; input.transform.scale sets one scale for both"
    )
    with pytest.raises(DataError, match=re.escape(said)):
        Attempt(spec).run()
    scaled = spec_of(
        tmp_path,
        schedule__on_miss="eager",
        train__validation={"source": source},
        train__epochs=1,
        input__transform={"scale": 0.01},
        train__lr_schedule={},
    )
    Attempt(scaled).run()
