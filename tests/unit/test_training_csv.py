"""Target numbers in CSV train as they do in Parquet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from nimble_jobs import spec as specs
from nimble_jobs.data import csv_cuts, csv_file, open_reader
from nimble_jobs.data.reader import Targets
from nimble_jobs.errors import DataError
from nimble_jobs.spec.model import FieldsSpec, InputSpec
from tests.trainings import Attempt, digests, lay_out, spec_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same 40 rows as CSV and as Parquet: three inputs, a number, and yes or no."""
    found = tmp_path_factory.mktemp("csv")
    lay_out(found)
    x = np.random.default_rng(0).normal(size=(40, 3)).round(3)
    rows = [[*row, round(float(row[0] - row[1]), 3), int(row[0] > row[1])] for row in x.tolist()]
    (found / "d.csv").write_text("a,b,c,y,over\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
    columns = dict(zip(("a", "b", "c", "y", "over"), zip(*rows, strict=True), strict=True))
    parquet.write_table(pa.table(columns), found / "d.parquet")
    return found


def regression(folder: Path, file: str, loss: str, label: str) -> specs.JobSpec:
    return spec_of(
        folder,
        output=f"{file}-{label}-{loss[:3]}/net",
        model__source=f"python:{folder}/model.py:line",
        input__source=str(folder / file),
        input__format=file.rpartition(".")[2],
        input__fields={"x": "a,b,c", "label": label},
        schedule__on_miss="eager",
        train__loss=loss if loss in ("mse", "bce") else f"python:{folder}/model.py:{loss}",
        train__augment={},
        train__validation=None,
    )


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("loss", "label"), [("mse", "y"), ("bce", "over"), ("absolute", "y"), ("absolute", "over")])
def test_numbers_are_those_of_parquet(
    folder: Path, monkeypatch: pytest.MonkeyPatch, loss: str, label: str, blocks: bool
) -> None:
    """mse, bce and a loss of the user's own, over a small file and over one that is read in blocks: equal bits."""
    if blocks:
        monkeypatch.setattr(csv_file, "WHOLE_BYTES", 0)
        monkeypatch.setattr(csv_cuts, "CUT_BYTES", 200)
    wanted, expected = regression(folder, "d.csv", loss, label), regression(folder, "d.parquet", loss, label)
    Attempt(wanted).run()
    Attempt(expected).run()
    assert digests(wanted.output.path) == digests(expected.output.path)


def read(path: Path, cells: list[str], targets: Targets) -> tuple[list[float], dict[int, str], str]:
    """The good labels, the reasons for bad records, and the labels' type."""
    path.write_text("x,y\n" + "".join(f"1,{cell}\n" for cell in cells))
    spec = InputSpec(source=str(path), format="csv", fields=FieldsSpec(x="x", label="y"))
    with open_reader(spec, targets=targets) as reader:
        batch = reader.take(np.arange(reader.total))
    assert batch.labels is not None
    return batch.labels.tolist(), {b.index: b.reason.partition(": ")[2] for b in batch.bad}, str(batch.labels.dtype)


def test_cells_that_are_no_numbers_are_bad_records(tmp_path: Path) -> None:
    """The rest of the column trains."""
    missing = "label is missing or not finite; expected a number"
    found = read(tmp_path / "d.csv", ["1.5", "", " -2e1 ", "oops", "1_0", "1e99", "3"], "numbers")
    bad = {1: missing, 3: "label is 'oops'; expected a number", 4: "label is '1_0'; expected a number", 5: missing}
    assert found == ([1.5, -20.0, 3.0], bad, "float32")
    shares = read(tmp_path / "d.csv", ["0", "1.0", "2", "x"], "shares")
    bad = {2: "label is 2; expected a number from 0 to 1", 3: "label is 'x'; expected a number"}
    assert shares == ([0.0, 1.0], bad, "float32")


def test_what_a_loss_of_ones_own_gets(tmp_path: Path) -> None:
    """Fractions are numbers; whole numbers and names stay classes."""
    path = tmp_path / "d.csv"
    assert read(path, ["0.5", "2", "x"], "stored") == ([0.5, 2.0], {2: "label is 'x'; expected a number"}, "float32")
    assert read(path, ["0", "2", "+1"], "stored")[::2] == ([0, 2, 1], "int64")
    assert read(path, ["b", "a"], "stored") == ([1, 0], {}, "int64")


@pytest.mark.parametrize("targets", ["numbers", "shares"])
def test_names_are_no_numbers(tmp_path: Path, targets: Targets) -> None:
    """A column without a single number is refused at once."""
    with pytest.raises(DataError, match=r"d\.csv: input\.fields\.label: holds text such as 'cat'; expected numbers"):
        read(tmp_path / "d.csv", ["", "cat", "dog"], targets)
