"""The names of classes that a training publishes beside its weights, and what a scoring job does with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from nimble_jobs.data import open_reader
from nimble_jobs.models.classes import Classes, classes_of
from nimble_jobs.spec import restore
from nimble_jobs.spec.model import ModelSpec
from nimble_jobs.workloads.training.session import number_as_head
from tests.cli import Cli

NET = "from torch import nn\n\n\ndef net(): return nn.Sequential(nn.Flatten(), nn.Linear(48, 3))\n"
NAMES = ["ant", "bee", "cat"]


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path / "home", capsys)


def pictures(folder: Path, names: list[str]) -> None:
    """Four in each folder, with the colour of their class."""
    for name in names:
        (folder / name).mkdir(parents=True)
        pixels = np.zeros((4, 4, 3), dtype=np.uint8)
        pixels[..., NAMES.index(name) if name in NAMES else 0] = 255
        for i in range(4):
            Image.fromarray(pixels).save(folder / name / f"{i}.png")


def run(cli: Cli, folder: Path, **parts: Any) -> str:
    """Run a job; returns what it wrote to stderr."""
    base = {"version": 1, "name": "net", "schedule": {"on_miss": "eager"}, "run": {"device": "cpu"}}
    (folder / "job.yaml").write_text(json.dumps(base | parts))
    answer = cli("run", str(folder / "job.yaml"), "--allow-python", str(folder))
    return "" if answer.code == 0 else answer.err


def trained(cli: Cli, folder: Path, source: str, output: str, **train: Any) -> str:
    """Train on these pictures; the error, if any."""
    return run(
        cli,
        folder,
        kind="finetune",
        model={"source": f"python:{folder}/net.py:net"},
        input={"source": str(folder / source), "format": "images", "fields": {"label": "parent"}, "batch_size": 4},
        output={"path": str(folder / output)},
        train=train,
    )


def events(cli: Cli, kind: str) -> list[str]:
    """What the newest job said about this."""
    shown = cli("show", "net", "--json").json
    return [event["message"] for event in shown["events"] if event["kind"] == kind]


def scored(cli: Cli, folder: Path, source: str, *fields: str) -> list[dict[str, Any]] | str:
    """Classes by the weights of the training, or the error."""
    error = run(
        cli,
        folder,
        kind="score",
        model={"source": f"python:{folder}/net.py:net", "weights": str(folder / "out/model.safetensors")},
        input={"source": str(folder / source), "format": "images", "fields": {"label": "parent"}},
        output={
            "path": str(folder / "scored"),
            "format": "jsonl",
            "fields": fields or ["label", "top1", "top1_label"],
            "if_exists": "replace",
        },
    )
    lines = [line for path in sorted((folder / "scored").glob("part-*")) for line in path.read_text().splitlines()]
    return error or [json.loads(line) for line in lines]


def test_classes_keep_their_numbers_and_names(cli: Cli, tmp_path: Path) -> None:
    """A scoring job over some of the classes numbers and names them as the training did."""
    (tmp_path / "net.py").write_text(NET)
    pictures(tmp_path / "train", NAMES)
    pictures(tmp_path / "new", ["ant", "cat"])
    pictures(tmp_path / "strange", ["cat", "dog"])
    pictures(tmp_path / "others", ["dog", "eel"])
    assert not trained(cli, tmp_path, "train", "out", epochs=8, optimizer={"name": "adam", "lr": 0.01})
    assert json.loads((tmp_path / "out/classes.json").read_text()) == NAMES
    assert json.loads((tmp_path / "out/manifest.json").read_text())["summary"]["classes"] == NAMES
    ant, cat = ({"label": i, "top1": i, "top1_label": NAMES[i]} for i in (0, 2))
    assert scored(cli, tmp_path, "new") == [ant] * 4 + [cat] * 4
    assert events(cli, "labels") == []
    assert "label is 'dog'; expected one of the 3 known names" in str(scored(cli, tmp_path, "strange"))
    found = scored(cli, tmp_path, "others")
    assert [row["label"] for row in found] == [0] * 4 + [1] * 4  # type: ignore[index]  # as the model knows none
    numbered = "; labels are numbered in alphabetical order, which may not be the numbers of the model's classes"
    told = "classes.json names ant, bee, cat, but none of the labels dog, eel"
    assert events(cli, "labels") == [told + numbered]
    (tmp_path / "out/classes.json").unlink()
    scored(cli, tmp_path, "new", "label", "top1")
    assert events(cli, "labels") == ["the model has no names of its classes" + numbered]
    scored(cli, tmp_path, "new", "top1")
    assert events(cli, "labels") == []


def test_a_training_goes_on_with_the_numbers_of_the_head_that_it_takes_over(cli: Cli, tmp_path: Path) -> None:
    """Also if its data lack some of the classes. Classes that the head does not know are numbered anew, and told."""
    (tmp_path / "net.py").write_text(NET)
    pictures(tmp_path / "train", NAMES)
    assert not trained(cli, tmp_path, "train", "out", epochs=8, optimizer={"name": "adam", "lr": 0.01})
    assert events(cli, "head") == []
    still = {"epochs": 1, "optimizer": {"name": "sgd", "lr": 1e-9}}
    init_from = str(tmp_path / "out/model.safetensors")
    pictures(tmp_path / "fewer", ["ant", "cat"])
    validation = {"source": str(tmp_path / "train")}
    assert not trained(cli, tmp_path, "fewer", "again", init_from=init_from, validation=validation, **still)
    assert json.loads((tmp_path / "again/classes.json").read_text()) == NAMES
    last = json.loads((tmp_path / "again/metrics.jsonl").read_text().splitlines()[-1])
    assert (last["accuracy"], last["val_accuracy"]) == (1, 1)
    assert events(cli, "head") == ["no record has the label bee, a class that is named beside the weights"]
    pictures(tmp_path / "others", ["ant", "dog", "eel"])
    assert not trained(cli, tmp_path, "others", "new", init_from=init_from, **still)
    assert json.loads((tmp_path / "new/classes.json").read_text()) == ["ant", "dog", "eel"]
    assert events(cli, "head") == [
        "the head is taken over, although its classes are named ant, bee, cat, not ant, dog, eel"
    ]
    (tmp_path / "out/classes.json").write_text("{")
    assert not trained(cli, tmp_path, "fewer", "unknown", init_from=init_from, **still)
    (told,) = events(cli, "head")
    assert f"{tmp_path}/out/classes.json: not JSON: " in told
    assert told.endswith("; classes are numbered in alphabetical order")


@pytest.mark.parametrize(
    ("config", "numbered", "told"),
    [
        ({"id2label": {"0": "cow", "1": "bee"}}, ("cow", "bee"), None),
        ({"id2label": {"0": "cow", "1": "ant"}}, None, "although its classes are named cow, ant, not bee, cow"),
        (
            {"id2label": {"0": "cow", "1": "bee", "2": "cow"}},
            None,
            "although its classes are named cow, bee, cow, not bee, cow",
        ),
        ({"id2label": {"0": "LABEL_0", "1": "LABEL_1"}}, None, None),
        ({"num_labels": 3}, None, None),
    ],
)
def test_a_head_that_a_configuration_names(
    config: dict[str, Any], numbered: tuple[str, ...] | None, told: str | None, tmp_path: Path
) -> None:
    """Names that transformers made up say nothing of the head."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    (tmp_path / "model/model.safetensors").touch()
    np.savez(tmp_path / "x.npz", x=np.zeros((2, 3)), y=["bee", "cow"])
    spec = restore(
        {
            "version": 1,
            "name": "net",
            "kind": "finetune",
            "model": {"source": f"transformers:{tmp_path}/model"},
            "input": {"source": str(tmp_path / "x.npz"), "format": "npz", "fields": {"x": "x", "label": "y"}},
            "output": {"path": str(tmp_path / "out")},
            "train": {"epochs": 1},
        }
    )
    with open_reader(spec.input) as reader:
        found, said = number_as_head(spec, reader)
        assert (found, reader.label_names) == (numbered, numbered or ("bee", "cow"))
    assert said == (told and f"the head is taken over, {told}")


def test_names_that_are_not_utf_8(cli: Cli, tmp_path: Path) -> None:
    """Folders may have any bytes in their names, and are told apart by them, also in events and by later jobs."""
    (tmp_path / "net.py").write_text(NET)
    names = ["a\udce9", "a\udcea", "b"]
    pictures(tmp_path / "train", names)
    pictures(tmp_path / "fewer", names[1:])
    still = {"epochs": 1, "optimizer": {"name": "sgd", "lr": 1e-9}}
    assert not trained(cli, tmp_path, "train", "out", **still)
    assert json.loads((tmp_path / "out/classes.json").read_text()) == names
    assert not trained(cli, tmp_path, "fewer", "again", init_from=str(tmp_path / "out/model.safetensors"), **still)
    assert events(cli, "head") == ["no record has the label a\\udce9, a class that is named beside the weights"]
    found = scored(cli, tmp_path, "fewer", "label", "top1_label")
    assert {row["label"] for row in found} == {1, 2}  # type: ignore[index]  # no error


@pytest.mark.parametrize(
    ("text", "why"),
    [("{", "not JSON"), ('{"a": 0}', "expected a list of different names"), ('["a", "a"]', "different")],
)
def test_a_file_that_is_no_list_of_names(text: str, why: str, tmp_path: Path) -> None:
    """It may be somebody else's, so only jobs that ask for names fail."""
    (tmp_path / "classes.json").write_text(text)
    classes = classes_of(ModelSpec(source="torchvision:resnet18", weights=str(tmp_path / "w.safetensors")))
    assert isinstance(classes, Classes)
    assert (classes.names, f"{tmp_path / 'classes.json'}: " in str(classes.unnamed)) == ((), True)
    assert why in str(classes.unnamed)
