"""Tables whose columns name pictures by their paths, alone or beside texts that become tokens."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nimble_jobs.data import Reader, csv_file, open_reader
from nimble_jobs.data.text.fixed import FixedRows
from nimble_jobs.data.text.tokenizer import Tokenizer, TokenRules
from nimble_jobs.errors import DataError
from nimble_jobs.spec.model import FieldsSpec, InputSpec
from nimble_jobs.spec.transform import TransformSpec
from tests.text_models import write_tokenizer
from tests.unit.test_images_with_texts import ids, png

CAPTIONS = ["the cat", "big dog", "12", "", "red mat", "a"]
BOTH: dict[str, str] = {"pixel_values": "picture", "input_ids": "caption"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six pictures in two folders."""
    for name in ("near", "away"):
        (tmp_path / name).mkdir()
    for i in range(6):
        (tmp_path / ("near" if i < 3 else "away") / f"{i}.png").write_bytes(png(i))
    return tmp_path


def paths(folder: Path) -> list[str]:
    """Relative to the table in near/, and absolute."""
    return ["0.png", "./1.png", "../near/2.png", "../away/3.png", *(f"{folder}/away/{i}.png" for i in (4, 5))]


def written(folder: Path, form: str, **columns: list[Any]) -> Path:
    table = {"name": [f"p{i}" for i in range(6)], "picture": paths(folder), "caption": CAPTIONS} | columns
    path = folder / "near" / f"pairs.{form}"
    form = path.suffix[1:]
    if form == "parquet":
        pq.write_table(pa.table(table), path, row_group_size=2)
    else:
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([list(table), *zip(*table.values(), strict=True)])
    return path


def opened(path: Path, x: str | dict[str, str], **given: Any) -> Reader:
    fields = FieldsSpec(x=x, id="name")
    form: Any = path.suffix[1:]

    def tokens() -> FixedRows:
        (path.parent / "tokens").mkdir(exist_ok=True)
        write_tokenizer(path.parent / "tokens")
        data = (path.parent / "tokens/tokenizer.json").read_bytes()
        rules = TokenRules(limit=16, truncate="end", prompt="", lower_case=False, vocabulary=40, types=False)
        return FixedRows(Tokenizer(data, rules, name="t"), padding=0, vocabulary=40)

    return open_reader(InputSpec(source=str(path), format=form, fields=fields, **given), tokens=tokens)


def pixels(reader: Reader, name: str = "pixel_values") -> np.ndarray:
    batch = reader.take(np.arange(reader.total))
    return batch.x if reader.packing is None else reader.packing.unpack(batch.x)[name]


def encoded(folder: Path, x: str | dict[str, str]) -> np.ndarray:
    """The same from a table that holds the pictures themselves."""
    path = written(folder, "parquet", picture=[png(i) for i in range(6)])
    with opened(path, x) as reader:
        return pixels(reader)


@pytest.mark.parametrize("form", ["csv", "large.csv", "parquet"])
def test_paths_beside_texts(folder: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The records are those of a table that holds the pictures. A caption is a text even if it is a number."""
    if form == "large.csv":
        monkeypatch.setattr(csv_file, "WHOLE_BYTES", 0)
    expected = encoded(folder, BOTH)
    with opened(written(folder, form), BOTH) as reader:
        assert reader.packing is not None
        batches = list(reader.batches(batch_size=4))
        found = [reader.packing.unpack(batch.x) for batch in batches]
        np.testing.assert_array_equal(np.concatenate([one["pixel_values"] for one in found]), expected)
        tokens = np.concatenate([one["input_ids"] for one in found])
        for row, text in zip(tokens.tolist(), CAPTIONS, strict=True):
            assert row[: len(ids(text))] == ids(text)
        assert [i for batch in batches for i in batch.ids] == [f"p{i}" for i in range(6)]


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_paths_alone(folder: Path, form: str) -> None:
    """As the only input, and as one of several that are all pictures; prepared as the transform says."""
    expected = encoded(folder, "picture")
    path = written(folder, form)
    with opened(path, "picture") as reader:
        assert reader.decodes
        np.testing.assert_array_equal(pixels(reader), expected)
    with opened(path, {"left": "picture", "right": "picture"}) as reader:
        np.testing.assert_array_equal(pixels(reader, "left"), pixels(reader, "right"))
    with opened(path, "picture", transform=TransformSpec(resize=(8, 8))) as reader:
        assert reader.signature.shape == (3, 8, 8)


@pytest.mark.parametrize("form", ["csv", "parquet"])
@pytest.mark.parametrize("x", ["picture", BOTH])
def test_bad_records_say_where_and_what(folder: Path, form: str, x: str | dict[str, str]) -> None:
    """With the line of a CSV file, the argument, the column, and the path as the table has it."""
    (folder / "near/1.png").write_bytes(b"no picture")
    (folder / "near/small.png").write_bytes(png(1)[:60])
    named = ["0.png", "1.png", "gone.png", "", "../away", "../away/5.png"]
    path = written(folder, form, picture=named)
    with opened(path, x) as reader:
        batch = reader.take(np.arange(6))
    before = [f"{path}:{line}: " if form == "csv" else "" for line in range(2, 8)]
    argument = "" if x == "picture" else "pixel_values: "
    assert batch.ids == ["p0", "p5"]
    assert [record.reason for record in batch.bad] == [
        f"{before[1]}{argument}column 'picture': '1.png': cannot be decoded: cannot identify image file",
        f"{before[2]}{argument}column 'picture': 'gone.png': there is no such file",
        f"{before[3]}{argument}column 'picture' is empty; expected the path of a picture",
        f"{before[4]}{argument}column 'picture': '../away': there is no such file",
    ]


def test_a_line_of_wrong_length_is_said(folder: Path) -> None:
    """It is no missing picture."""
    path = written(folder, "csv")
    path.write_text(path.read_text().replace("p1,./1.png,big dog", "p1,./1.png"))
    for x in ("picture", BOTH):
        with opened(path, x) as reader:  # type: ignore[arg-type]
            batch = reader.take(np.arange(6))
        assert [record.reason for record in batch.bad] == [f"{path}:3: line has 2 cells; expected 3"]


def test_pictures_are_part_of_the_input(folder: Path) -> None:
    """A job does not go on with other pictures, and fails if one changes while it reads."""
    path = written(folder, "csv")
    for x in ("picture", BOTH, {"left": "picture", "right": "picture"}):
        with opened(path, x) as reader:  # type: ignore[arg-type]
            before = reader.fingerprint
            (folder / "away/4.png").write_bytes(png(4) + b" ")
            with pytest.raises(DataError, match=r"away/4.png: changed while it was read"):
                reader.take(np.arange(6))
            (folder / "near/0.png").unlink()
            with pytest.raises(DataError, match=r"near/0.png: vanished while it was read"):
                reader.take(np.arange(1))
        (folder / "near/0.png").write_bytes(png(0))
        with opened(path, x) as reader:  # type: ignore[arg-type]
            assert reader.fingerprint != before
            assert reader.take(np.arange(6)).bad == ()


def test_texts_that_are_no_paths_are_refused(folder: Path) -> None:
    """As before, with what was found; and so is a column without any picture."""
    with pytest.raises(DataError, match=r"column 'caption': holds text such as 'the cat'; expected numbers"):
        opened(written(folder, "csv", caption=["the cat"] * 6), {"age": "caption"})
    with pytest.raises(DataError, match=r"'caption'.*: holds string; expected numbers"):
        opened(written(folder, "parquet"), {"age": "caption"})
    gone = written(folder, "csv", picture=["gone.png"] * 6)
    with pytest.raises(
        DataError, match=rf"^{gone}: input.fields.x: 'picture': no record can be decoded; .* found 'gone.png' first"
    ):
        opened(gone, "picture")
