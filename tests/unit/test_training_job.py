"""A training from data to published weights, against plain PyTorch written out by hand."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from nimble_jobs import spec as specs
from nimble_jobs.data import open_reader
from nimble_jobs.errors import DataError, JobFailed, ModelError, NimbleError
from nimble_jobs.models.build import build
from nimble_jobs.workloads import Stop
from nimble_jobs.workloads.training.batches.epochs import Sampler
from nimble_jobs.workloads.training.gauge import curves
from tests.augmented import changed
from tests.trainings import HELD_OUT, RECORDS, Attempt, digests, lay_out, metrics, spec_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data that all trainings of this module share."""
    found = tmp_path_factory.mktemp("training")
    lay_out(found)
    return found


def test_what_the_end_records(folder: Path) -> None:
    """The publication, also if an earlier attempt died before it could say so."""
    spec = spec_of(folder, output="recorded/net", train__epochs=1)
    first = Attempt(spec).run()
    assert first.publication is not None
    assert first.publication.path == str(spec.output.path)
    again = Attempt(spec, number=2).run()
    assert again.publication == first.publication


def by_hand(
    spec: specs.JobSpec,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    rate: Callable[[int], float],
    *,
    accumulate: int = 1,
    clip: float | None = None,
    smoothing: float = 0.0,
    prepare: Callable[[nn.Module], None] = lambda _: None,
) -> tuple[nn.Module, list[float]]:
    """The same training in plain PyTorch: the module, and the loss of each step."""
    assert spec.train is not None
    module = build(spec.model, allowed_python=(Path(spec.output.path).parents[1],)).train()
    prepare(module)
    with open_reader(spec.input) as reader:
        everything = reader.take(np.arange(reader.total))
    assert everything.labels is not None
    black = np.zeros((1, 1, 1), dtype=np.float32)
    opt = optimizer(module)
    torch.manual_seed(spec.model.seed)
    losses = []
    for epoch in range(1, spec.train.epochs + 1):
        order = Sampler(RECORDS, 8, seed=spec.model.seed, last_batch=spec.train.last_batch).order(epoch)
        batches = [order[i : i + 8] for i in range(0, len(order), 8)]
        for first in range(0, len(batches), accumulate):
            opt.zero_grad()
            total, seen = 0.0, 0
            for batch in batches[first : first + accumulate]:
                x = changed(everything.x[batch], batch, epoch, spec.train.augment, seed=spec.model.seed, black=black)
                logits = module(torch.from_numpy(x))
                y = torch.from_numpy(everything.labels[batch])
                loss = nn.functional.cross_entropy(logits, y, label_smoothing=smoothing)
                (loss / accumulate).backward()
                total, seen = total + float(loss.detach()) * len(batch), seen + len(batch)
            if clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            for group in opt.param_groups:
                group["lr"] = rate(len(losses))
            opt.step()
            losses.append(total / seen)
    return module, losses


def compare(spec: specs.JobSpec, module: nn.Module, losses: list[float], tolerance: float, *, noise: str = "") -> None:
    """The job's losses and weights, but those named `noise`, are within a relative difference of plain PyTorch's."""
    Attempt(spec).run()
    found = [line["loss"] for line in metrics(spec.output.path, "step")]
    assert found == pytest.approx(losses, rel=tolerance)
    weights = load_file(spec.output.path / "model.safetensors")
    expected = module.state_dict()
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        close = torch.allclose(tensor.double(), expected[name].double(), rtol=tolerance * 100, atol=1e-5)
        assert close or name == noise, name


def cosine(step: int) -> float:
    return 0.05 * (step + 1) / 2 if step < 2 else 0.025 * (1 + math.cos(math.pi * (step - 2) / 12))


@pytest.mark.parametrize("on_miss", ["build", "eager"])
def test_the_curve_of_plain_pytorch(folder: Path, on_miss: str) -> None:
    """SGD with momentum and decay, warm-up and cosine, dropout, crops, a short last batch: the same losses to 1e-5."""
    spec = spec_of(folder, output=f"plain-{on_miss}/net", schedule__on_miss=on_miss)
    module, losses = by_hand(
        spec, lambda m: torch.optim.SGD(m.parameters(), lr=1.0, momentum=0.9, weight_decay=1e-3), cosine
    )
    compare(spec, module, losses, 1e-5)


def test_accumulation_clipping_and_decay_by_groups(folder: Path) -> None:
    """AdamW over three batches a step, the last group of an epoch shorter, clipped, no decay on norms and biases."""
    spec = spec_of(
        folder,
        output="groups/net",
        train__optimizer={
            "name": "adamw",
            "lr": 0.01,
            "weight_decay": 0.1,
            "no_decay_on_norms": True,
            "betas": [0.8, 0.9],
            "eps": 1e-6,
        },
        train__lr_schedule={"name": "constant"},
        train__accumulate=3,
        train__clip_norm=0.5,
        train__label_smoothing=0.1,
        train__last_batch="drop",
        train__checkpoint={},
    )

    def adamw(module: nn.Module) -> torch.optim.Optimizer:
        flat = [p for p in module.parameters() if p.dim() < 2]
        deep = [p for p in module.parameters() if p.dim() >= 2]
        groups = [{"params": deep, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9), eps=1e-6)

    module, losses = by_hand(spec, adamw, lambda _: 0.01, accumulate=3, clip=0.5, smoothing=0.1)
    assert len(losses) == 4
    compare(spec, module, losses, 1e-5, noise="0.bias")  # before a norm: no gradient but rounding, which Adam scales up


def test_frozen_layers(folder: Path) -> None:
    """Frozen parameters and the statistics of frozen norms stay as they were; the rest changes."""
    spec = spec_of(folder, output="frozen/net", train__freeze=["0.*", "1.*"])
    before = build(spec.model, allowed_python=(folder,)).state_dict()
    Attempt(spec).run()
    after = load_file(spec.output.path / "model.safetensors")
    same = {name for name in after if after[name].equal(before[name])}
    assert same == {name for name in after if name.startswith(("0.", "1."))}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_mixed_precision(folder: Path, dtype: str) -> None:
    """The losses follow those of fp32 to 5 %, and weights are kept and published in fp32."""
    full, half = (
        spec_of(folder, output=f"{name}-{dtype}/net", model__dtype=name, schedule__on_miss="eager")
        for name in ("fp32", dtype)
    )
    curves_ = []
    for spec in (full, half):
        Attempt(spec).run()
        curves_.append([line["loss"] for line in metrics(spec.output.path, "step")])
    assert curves_[1] == pytest.approx(curves_[0], rel=0.05)
    weights = load_file(half.output.path / "model.safetensors")
    assert {t.dtype for t in weights.values() if t.is_floating_point()} == {torch.float32}


def test_scaled_losses_go_on_exactly(folder: Path) -> None:
    """The state of loss scaling is part of a checkpoint."""
    changes = {"model__dtype": "fp16", "train__accumulate": 2, "train__checkpoint": {"every_steps": 1}}
    whole = spec_of(folder, output="scaled/net", schedule__on_miss="eager", **changes)
    Attempt(whole).run()
    spec = spec_of(folder, output="scaled-on/net", schedule__on_miss="eager", **changes)
    Attempt(spec, stop=lambda asked: Stop.DRAIN if asked >= 3 else Stop.GO).run()
    second = Attempt(spec, number=2)
    second.run()
    assert second.said("resumed")
    assert digests(spec.output.path) == digests(whole.output.path)


def regression(folder: Path, **changes: Any) -> specs.JobSpec:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3)).astype(np.float32)
    y = x @ np.array([1.0, -2.0, 0.5], dtype=np.float32) + 0.25
    np.savez(folder / "line.npz", x=x, y=y, over=(y > 0).astype(np.float32))
    return spec_of(
        folder,
        model__source=f"python:{folder}/model.py:line",
        input__source=str(folder / "line.npz"),
        train__augment={},
        **({} if any(name.startswith("train__validation") for name in changes) else {"train__validation": None}),
        train__epochs=30,
        train__lr_schedule={"name": "constant"},
        schedule__on_miss="eager",
        **{"input__fields": {"x": "x", "label": "y"}, **changes},
    )


@pytest.mark.parametrize("loss", ["mse", "python"])
def test_numbers_are_met(folder: Path, loss: str) -> None:
    """mse and a loss of the user's own fit the line; numbers have no accuracy."""
    name = loss if loss == "mse" else f"python:{folder}/model.py:absolute"
    spec = regression(folder, output=f"line-{loss}/net", train__loss=name)
    Attempt(spec).run()
    weights = load_file(spec.output.path / "model.safetensors")
    assert weights["weight"][0].tolist() == pytest.approx([1.0, -2.0, 0.5], abs=0.1)
    assert weights["bias"].tolist() == pytest.approx([0.25], abs=0.1)
    assert "accuracy" not in metrics(spec.output.path, "epoch")[-1]


def test_yes_or_no(folder: Path) -> None:
    """bce falls well below the loss of a guess."""
    spec = regression(folder, output="bce/net", train__loss="bce", input__fields={"x": "x", "label": "over"})
    Attempt(spec).run()
    assert metrics(spec.output.path, "epoch")[-1]["loss"] < 0.35


@pytest.mark.parametrize("label", [-0.5, 1.5])
def test_neither_yes_nor_no(folder: Path, label: float) -> None:
    """bce has no minimum for a label outside 0 to 1, so its record is bad."""
    spec = regression(
        folder, output=f"shares-{label}/net", train__loss="bce", input__fields={"x": "x", "label": "over"}
    )
    with np.load(folder / "line.npz") as arrays:
        over = arrays["over"].copy()
        over[3] = label
        np.savez(folder / "line.npz", x=arrays["x"], over=over)
    with pytest.raises(
        DataError, match=rf"1 of 40 .* the last one is 3: label is {label}; expected a number from 0 to 1"
    ):
        Attempt(spec).run()


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"lr_schedule": {"name": "linear", "warmup_steps": 500}}, r"train\.lr_schedule\.warmup_steps: found 500, but"),
        ({"augment": {"flip": "both"}}, r"train\.augment: records are float32 \[3\]; expected images"),
    ],
)
def test_refused_before_a_schedule_is_built(folder: Path, train: dict[str, Any], message: str) -> None:
    """A training that does not fit its data is refused before anything is built."""
    spec = regression(folder, output="refused/net", train__loss="mse")
    attempt = Attempt(specs.restore({**specs.dump(spec), "train": {**specs.dump(spec)["train"], **train}}))
    with pytest.raises(NimbleError, match=message):
        attempt.run()
    assert not attempt.reports


def test_accuracy_of_numbers_is_refused(folder: Path) -> None:
    """Accuracy as a criterion is refused if labels are numbers."""
    spec = regression(
        folder,
        output="none/net",
        train__loss=f"python:{folder}/model.py:absolute",
        train__checkpoint={"best": "accuracy"},
    )
    with pytest.raises(JobFailed, match=r"train\.checkpoint\.best: accuracy needs labels that are classes"):
        Attempt(spec).run()


def test_a_label_without_a_class_in_the_first_batch(folder: Path) -> None:
    """A number out of range is refused before the model sees it: on a device it would end the process."""
    with np.load(folder / "train.npz") as arrays:
        labels = arrays["labels"].copy()
        labels[2] = 7
        np.savez(folder / "seven.npz", images=arrays["images"], labels=labels)
    message = r"input\.fields\.label: found the label 7 of record .* \(.*: record \d+\); expected 0 to 3, as"
    with pytest.raises(DataError, match=message):
        Attempt(spec_of(folder, output="seven/net", input__source=str(folder / "seven.npz"))).run()


NOT_RECORDED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.first = first
        self.rest = nn.Sequential(nn.BatchNorm1d(64), nn.Dropout(0.2), nn.Linear(64, 4))

    def forward(self, x):
        return self.rest(self.first(x.flatten(1)))

def chooses():
    return Net(lambda x: torch.cond(x.sum() > 0, lambda u: u + 1, lambda u: u - 1, (x,)))

def sparse():
    return Net(lambda x: x.to_sparse().to_dense())

def fails():
    return Net(lambda x: {0: x}[torch._C._len_torch_dispatch_stack()])
"""


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("chooses", r"cond at .*cannot\.py:\d+.* takes functions"),
        ("sparse", r"aten._to_sparse.* at .*cannot\.py:\d+.* is sparse_coo"),
        ("fails", "the model fails while it is recorded: KeyError: 1"),
    ],
)
def test_a_model_that_cannot_be_recorded_trains_in_eager(folder: Path, name: str, why: str) -> None:
    """The job says why it runs in eager, and its weights have the bits of a job that asked for eager."""
    (folder / "cannot.py").write_text(NOT_RECORDED)
    weights = []
    for on_miss in ("eager", "build"):
        spec = spec_of(
            folder,
            output=f"{name}-{on_miss}/net",
            model__source=f"python:{folder}/cannot.py:{name}",
            schedule__on_miss=on_miss,
            train__epochs=1,
        )
        attempt = Attempt(spec)
        schedule = attempt.run().schedule
        weights.append(digests(spec.output.path)["model.safetensors"])
    assert schedule["runs"] == "eager"
    assert re.match(why, schedule["fallback"])
    assert attempt.said("fallback")[0] == f"runs in eager: {schedule['fallback']}"
    assert weights[0] == weights[1]


def test_a_held_out_label_without_a_class(folder: Path) -> None:
    """The error names the held-out records' field."""
    with np.load(folder / "held-out.npz") as arrays:
        labels = arrays["labels"].copy()
        labels[-1] = 7
        np.savez(folder / "held-seven.npz", images=arrays["images"], labels=labels)
    spec = spec_of(folder, output="held/net", train__validation={"source": str(folder / "held-seven.npz")})
    with pytest.raises(DataError, match=r"train\.validation\.source: found the label 7 of record .*; expected 0 to 3"):
        Attempt(spec).run()


def test_no_good_record(folder: Path) -> None:
    """The error says what is wrong with the first record."""
    with np.load(folder / "train.npz") as arrays:
        np.savez(folder / "negative.npz", images=arrays["images"], labels=-1 - arrays["labels"])
    spec = spec_of(folder, output="none/net", input__source=str(folder / "negative.npz"))
    with pytest.raises(DataError, match=r"no good record to train on, the first is 0: .*label.*; expected"):
        Attempt(spec).run()


def test_one_record_trains_nothing(folder: Path) -> None:
    """Weights that were never trained are not published as if they had been."""
    with np.load(folder / "train.npz") as arrays:
        np.savez(folder / "one.npz", images=arrays["images"][:1], labels=arrays["labels"][:1])
    spec = spec_of(folder, output="one/net", input__source=str(folder / "one.npz"), train__lr_schedule={})
    with pytest.raises(DataError, match=r"input\.source: no batch has 2 good records; expected one to train on"):
        Attempt(spec).run()
    assert not spec.output.path.exists()


def test_a_loss_from_a_folder_that_is_not_allowed(folder: Path, tmp_path: Path) -> None:
    """A user's loss is code, so it needs the same permission as a user's model."""
    (tmp_path / "loss.py").write_text("def f(a, b): return a.mean()\n")
    with pytest.raises(ModelError, match=r"train\.loss: .*loss\.py may not be run; allow its folder"):
        Attempt(spec_of(folder, output="x/net", train__loss=f"python:{tmp_path}/loss.py:f")).run()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("(a[:, 0] - b).abs()", r"a tensor of shape \[8\], torch\.float32, that requires grad; expected the mean"),
        ("a.detach().mean()", r"a tensor of shape \[\], torch\.float32, that does not require grad"),
        ("a.argmax()", r"a tensor of shape \[\], torch\.int64, that does not require grad"),
        ("a.detach().mean().item()", r"a float; expected the mean loss"),
    ],
)
def test_a_loss_that_returns_no_loss(folder: Path, body: str, message: str) -> None:
    """A loss that returns something else is refused before anything is trained, with its file and its result."""
    (folder / "wrong.py").write_text(f"def f(a, b): return {body}\n")
    spec = regression(folder, output="wrong/net", train__loss=f"python:{folder}/wrong.py:f")
    with pytest.raises(ModelError, match=r"train\.loss: .*wrong\.py returned " + message):
        Attempt(spec).run()


def test_a_loss_that_fails(folder: Path) -> None:
    """An error in a user's loss names file and line."""
    (folder / "fails.py").write_text("def f(a, b):\n    a = a[:, 0]\n    return a.nothing\n")
    spec = regression(folder, output="fails/net", train__loss=f"python:{folder}/fails.py:f")
    with pytest.raises(ModelError, match=r"train\.loss: .*fails\.py:3: AttributeError: .*'nothing'"):
        Attempt(spec).run()


@pytest.mark.parametrize("stop_after", [0, 3])
def test_bad_records(folder: Path, stop_after: int) -> None:
    """Bad records are left out of each epoch and listed once, even by an attempt that did not read them."""
    spec = regression(folder, output=f"bad-{stop_after}/net", train__loss="mse", run={"error_threshold": 0.1})
    with np.load(folder / "line.npz") as data:
        x, y = data["x"].copy(), data["y"]
    x[[4, 17]] = np.nan
    np.savez(folder / "line.npz", x=x, y=y)
    if stop_after:
        Attempt(spec, stop=lambda asked: Stop.DRAIN if asked >= stop_after else Stop.GO).run()
    Attempt(spec, number=2).run()
    lines = [json.loads(line) for line in (spec.output.path / "errors.jsonl").read_text().splitlines()]
    assert [(line["index"], line["id"]) for line in lines] == [(4, "4"), (17, "17")]
    assert "NaN or infinite" in lines[0]["reason"]


@pytest.mark.parametrize("threshold", [0.0, 0.1])
def test_bad_records_of_a_validation(folder: Path, threshold: float) -> None:
    """Bad held-out records have a threshold of their own; a job that tolerates them says so once."""
    source = folder / "held-line.npz"
    spec = regression(
        folder,
        output=f"held-{threshold}/net",
        train__loss="mse",
        train__validation__source=str(source),
        run={"error_threshold": threshold},
    )
    with np.load(folder / "line.npz") as data:
        x, y = data["x"].copy(), data["y"]
    x[[3, 20]] = np.nan
    np.savez(source, x=x, y=y)
    attempt = Attempt(spec)
    if not threshold:
        with pytest.raises(
            DataError, match=r"1 of 40 held-out records are bad, more than .*; the last one is 3: .*NaN"
        ):
            attempt.run()
        return
    attempt.run()
    (told,) = attempt.said("bad-records")
    assert told.startswith("validations leave out 2 of 40 records; the first is 3: ")
    assert len(metrics(spec.output.path, "epoch")) == 30


def test_what_is_published(folder: Path) -> None:
    """The output holds weights that fit the model, a line for each step and epoch, a picture, and nothing else."""
    spec = spec_of(folder, output="published/net", schedule__on_miss="eager")
    attempt = Attempt(spec, drawn=True)
    outcome = attempt.run()
    assert sorted(p.name for p in spec.output.path.iterdir()) == [
        "curves.png",
        "manifest.json",
        "metrics.jsonl",
        "model.safetensors",
    ]
    assert (spec.output.path / "curves.png").read_bytes().startswith(b"\x89PNG")
    steps, epochs = (metrics(spec.output.path, kind) for kind in ("step", "epoch"))
    assert [line["step"] for line in steps] == list(range(1, 15))
    assert steps[0]["lr"] == 0.025
    assert [line["epoch"] for line in epochs] == [1, 2]
    assert all(0 <= line["val_accuracy"] * HELD_OUT == round(line["val_accuracy"] * HELD_OUT) for line in epochs)
    assert outcome.timings["steps_per_s"] > 0
    assert len(attempt.said("epoch")) == 2
    told = [r["timings"] for r in attempt.reports if "timings" in r]
    assert {"loss", "accuracy", "steps_per_s", "remaining_s", "step", "steps"} <= told[-1].keys()
    assert attempt.reports[-2]["done"] == 2 * RECORDS
    manifest = json.loads((spec.output.path / "manifest.json").read_text())
    assert manifest["summary"]["metrics"]["val_loss"] == epochs[-1]["val_loss"]


def test_without_matplotlib(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib the job says that there is no picture, and is otherwise the same."""
    monkeypatch.setattr(curves, "available", lambda: False)
    attempt = Attempt(spec_of(folder, output="no-curves/net", schedule__on_miss="eager"))
    attempt.run()
    assert "matplotlib is not installed" in attempt.said("no-curves")[0]
    assert not (folder / "no-curves/net/curves.png").exists()


def test_early_stopping(folder: Path) -> None:
    """A training that does not improve ends, says after which epoch, and publishes."""
    spec = spec_of(
        folder,
        output="early/net",
        schedule__on_miss="eager",
        train__epochs=9,
        train__optimizer={"lr": 1e-12},
        train__early_stopping={"metric": "val_accuracy", "patience": 2},
    )
    attempt = Attempt(spec)
    attempt.run()
    assert attempt.said("early-stopping") == ["after epoch 3: val_accuracy did not improve in 2 measurements"]
    assert len(metrics(spec.output.path, "epoch")) == 3


def test_nothing_but_short_batches(folder: Path) -> None:
    """If the input fills no batch, dropping the last one leaves nothing to train on, which is refused."""
    spec = spec_of(folder, output="x/net", input__batch_size=64, train__last_batch="drop")
    with pytest.raises(
        DataError,
        match=r"train\.last_batch: drop leaves no batch, because 52 records do not fill one of 64; expected keep",
    ):
        Attempt(spec).run()


def test_tensorboard_that_is_not_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that asks for TensorBoard does not run without it."""
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else find(name))
    attempt = Attempt(spec_of(folder, output="x/net", train__tensorboard=True))
    with pytest.raises(
        JobFailed, match=r"train\.tensorboard: TensorBoard is not installed; install it with: pip install"
    ):
        attempt.run()
    assert not attempt.reports  # nothing was built


def test_tensorboard(folder: Path) -> None:
    """The event file holds each step's loss and each epoch's measures, and is published with the rest."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    spec = spec_of(folder, output="board/net", train__tensorboard=True, schedule__on_miss="eager")
    Attempt(spec).run()
    (file,) = spec.output.path.glob("events.out.tfevents.*")
    found = EventAccumulator(str(file)).Reload()
    losses = [event.value for event in found.Scalars("train/loss")]
    assert losses == pytest.approx([line["loss"] for line in metrics(spec.output.path, "step")])
    assert len(found.Scalars("epoch/val_accuracy")) == 2
    manifest = json.loads((spec.output.path / "manifest.json").read_text())
    assert file.name in [entry["name"] for entry in manifest["files"]]


@pytest.mark.parametrize("how", [Stop.CANCEL, Stop.DRAIN])
def test_stopped_while_its_step_is_searched(folder: Path, how: Stop) -> None:
    """A job that is told to stop while it builds stops before the next candidate, and says so; nothing was trained."""
    attempt = Attempt(spec_of(folder, output=f"searched-{how}/net"), stop=lambda _: how)
    assert attempt.run().stop is how
    assert attempt.asked == 0
    assert attempt.said("fallback") == []
    (said,) = attempt.said("stopped")
    assert said.endswith(" s of building the training step")
    assert not (folder / f"searched-{how}/net").exists()
