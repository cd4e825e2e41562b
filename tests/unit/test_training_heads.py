"""The head that a training on texts begins with, and the classes that labels make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from nimble_jobs.errors import DataError
from nimble_jobs.workloads import Stop
from tests.text_models import rewrite
from tests.text_trainings import RECORDS, lay_out, spec_of, write_texts
from tests.trainings import Attempt, metrics

pytestmark = pytest.mark.usefixtures("one_thread")

STILL = {"name": "adamw", "lr": 1e-9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, and a trained classifier of cats and dogs whose classes are numbered the other way round."""
    found = tmp_path_factory.mktemp("heads")
    lay_out(found)
    trained(found, "trained", train__epochs=15, train__optimizer={"name": "adamw", "lr": 0.01})
    weights = load_file(found / "out/trained/model.safetensors")
    for name in ("classifier.weight", "classifier.bias"):
        weights[name] = weights[name].flip(0).contiguous()
    save_file(weights, found / "out/trained/model.safetensors", metadata={"format": "pt"})
    named(found, "dog", "cat")
    return found


def named(folder: Path, *names: str) -> None:
    """The names of the trained classifier's classes."""
    numbers = {name: i for i, name in enumerate(names)}
    rewrite(folder / "out/trained/config.json", id2label={str(i): n for n, i in numbers.items()}, label2id=numbers)


def trained(folder: Path, output: str, **changes: Any) -> Attempt:
    given = {"schedule": {"on_miss": "eager"}, "train__lr_schedule": {"name": "constant"}, **changes}
    attempt = Attempt(spec_of(folder, output=f"out/{output}", **given))
    attempt.run()
    return attempt


@pytest.mark.parametrize("begins", ["model", "init_from"])
def test_a_trained_head_keeps_the_order_of_its_classes(begins: str, folder: Path) -> None:
    """Its answers are right from the first step, and the published configuration names them."""
    changes: dict[str, Any] = {"train__epochs": 1, "train__optimizer": STILL}
    if begins == "model":
        changes["model__source"] = f"transformers:{folder}/out/trained"
    else:
        changes["train__init_from"] = str(folder / "out/trained/model.safetensors")
    attempt = trained(folder, begins, **changes)
    assert metrics(folder / "out" / begins, "epoch")[-1]["val_accuracy"] == 1
    assert json.loads((folder / "out" / begins / "config.json").read_text())["id2label"] == {"0": "dog", "1": "cat"}
    assert json.loads((folder / "out" / begins / "manifest.json").read_text())["summary"]["classes"] == ["dog", "cat"]
    assert not attempt.said("head")


def test_the_order_of_the_classes_decides_a_training(folder: Path) -> None:
    """A checkpoint of another order would train other classes."""
    spec = spec_of(
        folder,
        output="out/ordered",
        schedule={"on_miss": "eager"},
        train__init_from=str(folder / "out/trained/model.safetensors"),
        train__checkpoint={"every_steps": 1},
    )
    Attempt(spec, stop=lambda asked: Stop.CANCEL if asked == 3 else Stop.GO).run()
    for order, resumed in ((("cat", "dog"), False), (("dog", "cat"), True)):
        named(folder, *order)
        attempt = Attempt(spec, stop=lambda asked: Stop.CANCEL if asked == 1 else Stop.GO)
        attempt.run()
        assert bool(attempt.said("resumed")) == resumed


def test_a_head_whose_classes_are_not_all_among_the_labels(folder: Path, tmp_path: Path) -> None:
    """Its numbers stay, and so do the classes that no label has. Labels of a single class are still refused."""
    three, few = tmp_path / "three.parquet", tmp_path / "few.parquet"
    write_texts(three, RECORDS, seed=2, names=("ant", "bee", "cow"))
    table = pq.read_table(three)
    changes = {"train__validation": None, "train__epochs": 15, "train__optimizer": {"name": "adamw", "lr": 0.01}}
    trained(folder, "three", input__source=str(three), **changes)
    init_from = str(folder / "out/three/model.safetensors")
    pq.write_table(table.filter(pc.field("animal") != "bee"), few)
    changes = {"train__init_from": init_from, "train__epochs": 1, "train__optimizer": STILL}
    attempt = trained(folder, "few", input__source=str(few), train__validation={"source": str(few)}, **changes)
    assert metrics(folder / "out/few", "epoch")[-1]["val_accuracy"] == 1
    assert attempt.said("head") == ["no record has the label bee, a class that is named beside the weights"]
    names = json.loads((folder / "out/few/config.json").read_text())["id2label"]
    assert names == {"0": "ant", "1": "bee", "2": "cow"}
    pq.write_table(table.filter(pc.field("animal") == "cow"), few)
    with pytest.raises(DataError, match=r"input\.fields\.label: found 'cow' alone; expected at least two classes"):
        trained(folder, "one", input__source=str(few), train__validation=None, **changes)


def test_the_job_says_what_head_it_begins_with(folder: Path, tmp_path: Path) -> None:
    """A new one, or one whose classes have other names."""
    (said,) = trained(folder, "new", train__epochs=1).said("head")
    assert said == "the head is new: the weights have none for 2 classes"
    table = pq.read_table(folder / "train.parquet")
    animals = ["owl" if name == "dog" else name for name in table["animal"].to_pylist()]
    pq.write_table(table.set_column(2, "animal", pa.array(animals)), tmp_path / "owls.parquet")
    attempt = trained(
        folder,
        "other",
        model__source=f"transformers:{folder}/out/trained",
        input__source=str(tmp_path / "owls.parquet"),
        train__validation=None,
        train__epochs=1,
    )
    (said,) = attempt.said("head")
    assert said == "the head is taken over, although its classes are named dog, cat, not cat, owl"
    made = load_file(folder / "out/other/model.safetensors")
    assert torch.isfinite(made["classifier.weight"]).all()


def test_numbers_that_no_label_has(folder: Path, tmp_path: Path) -> None:
    """A few are told, and many are refused."""
    table = pq.read_table(folder / "train.parquet")

    def source(*numbers: int) -> str:
        animals = [numbers[i % len(numbers)] for i in range(RECORDS)]
        pq.write_table(table.set_column(2, "animal", pa.array(animals)), tmp_path / "numbers.parquet")
        return str(tmp_path / "numbers.parquet")

    attempt = trained(folder, "gaps", input__source=source(1, 2, 4), train__validation=None, train__epochs=1)
    (said,) = attempt.said("labels")
    assert said.startswith("no record has the label 0, 3 of the classes 0 to 4; ")
    attempt = trained(
        folder, "stars", input__source=source(10, 20, 30, 40, 50), train__validation=None, train__epochs=1
    )
    (said,) = attempt.said("labels")
    assert "of the classes 0 to 50" in said
    with pytest.raises(DataError, match=r"found the label 1000 of .*; expected .*, numbers below 1000, or names"):
        trained(folder, "ids", input__source=source(0, 1, 1000), train__validation=None)
    with pytest.raises(DataError, match=r"found the label 9999 of record t-2, although there are 3 different labels"):
        trained(folder, "far", input__source=source(0, 1, 9999), train__validation=None)
