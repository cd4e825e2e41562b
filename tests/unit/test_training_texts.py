"""A training on texts: batches by bucket, the losses of plain PyTorch, exact resumption, and what it publishes."""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score
from torch import nn

from nimble_jobs import spec as specs
from nimble_jobs.data import open_reader
from nimble_jobs.errors import DataError, EngineError, ModelError
from nimble_jobs.models.build import build
from nimble_jobs.models.classifier import as_classifier
from nimble_jobs.packing import text_layout
from nimble_jobs.planner.step.several import SeveralSteps
from nimble_jobs.workloads import Stop
from nimble_jobs.workloads.training.batches.bucketed import Bucket, groups_of
from nimble_jobs.workloads.training.step import validation
from nimble_jobs.workloads.training.step.f1 import F1
from nimble_jobs.workloads.training.step.texts import TrainTexts
from tests import prefork
from tests.text_models import write_bert, write_bert_tokenizer
from tests.text_trainings import HELD_OUT, RECORDS, lay_out, spec_of, write_texts
from tests.trainings import Attempt, digests, metrics

pytestmark = pytest.mark.usefixtures("one_thread")  # as the killed process here uses

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data that all trainings of this module share."""
    found = tmp_path_factory.mktemp("texts")
    lay_out(found)
    return found


def buckets(*pairs: tuple[int, int]) -> list[Bucket]:
    return [Bucket(tokens=tokens, rows=rows, layout=text_layout(tokens)) for tokens, rows in pairs]


# ---- batches


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 32), min_size=1, max_size=60),
    rows=st.tuples(st.integers(1, 7), st.integers(1, 7), st.integers(1, 7)),
    drop=st.booleans(),
    seed=st.integers(0, 5),
)
def test_batches_hold_every_record_once(lengths: list[int], rows: tuple[int, ...], drop: bool, seed: int) -> None:
    """In a bucket that holds it, whatever the order; only the last batch may be short. Their number and shapes do not
    depend on the order.
    """
    made = buckets(*zip((8, 16, 32), rows, strict=True))
    array, last = np.array(lengths), "drop" if drop else "keep"
    order = np.random.default_rng(seed).permutation(len(lengths))
    found = groups_of(order, array, made, last_batch=last)  # type: ignore[arg-type]
    used = [record for group in found for record in group.records.tolist()]
    assert len(used) == len(set(used))
    assert len(lengths) - len(used) < rows[2] if drop else len(used) == len(lengths)
    for group in found:
        assert array[group.records].max() <= made[group.bucket].tokens
    whole = [group for group in found if len(group.records) == made[group.bucket].rows]
    short = [group for group in found if len(group.records) < made[group.bucket].rows]
    assert len(short) <= (0 if drop else 1)
    assert not short or short[0] is found[-1]
    other = groups_of(np.arange(len(lengths)), array, made, last_batch=last)  # type: ignore[arg-type]
    assert Counter((g.bucket, len(g.records)) for g in other) == Counter((g.bucket, len(g.records)) for g in found)
    assert whole or len(lengths) < sum(rows)


def test_epochs_have_orders_of_their_own(folder: Path) -> None:
    """The same for equal seed and epoch; another one in the next epoch, and with another seed."""
    with open_reader(spec_of(folder).input) as reader:
        one, other = (TrainTexts.read(spec_of(folder, model__seed=seed), reader, None).epochs for seed in (0, 1))
    orders = [
        [group.records.tolist() for group in epochs.groups(epoch)] for epochs, epoch in ((one, 1), (one, 2), (other, 1))
    ]
    assert orders[0] == [group.records.tolist() for group in one.groups(1)]
    assert all(a != b for a, b in itertools.pairwise(orders))
    assert one.sampler.records == RECORDS
    assert one.sampler.batches == len(orders[0])


def test_rows_hold_the_tokens_of_their_records(folder: Path) -> None:
    """Ids as the tokenizer gives them, padding behind, the length as mask; a bucket has fewer rows if its batch would
    have too many tokens.
    """
    spec = spec_of(folder, input__text={"max_length": 32, "buckets": [16, 32], "tokens_per_batch": 128})
    with open_reader(spec.input) as reader:
        read = TrainTexts.read(spec, reader, None)
    assert [(bucket.tokens, bucket.rows) for bucket in read.epochs.buckets] == [(16, 8), (32, 4)]
    assert read.names == ("cat", "dog")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "bert")
    texts = pq.read_table(folder / "train.parquet")["text"].to_pylist()
    bucket = read.epochs.buckets[1]
    rows = bucket.layout.unpack(read.epochs.tokens.rows(np.array([3, 7]), bucket.layout, 32))
    expected = tokenizer([texts[3], texts[7]], padding="max_length", max_length=32, truncation=True)
    assert rows["input_ids"].tolist() == expected["input_ids"]
    assert rows["attention_mask"].tolist() == [sum(mask) for mask in expected["attention_mask"]]


@pytest.mark.parametrize("gives", [True, False])
def test_pairs_have_types(folder: Path, tmp_path: Path, gives: bool) -> None:
    """Of two columns the tokenizer joins the texts, and the model is told which tokens are whose, if the folder's
    tokenizer does so.
    """
    table = pq.read_table(folder / "train.parquet")
    pq.write_table(table.append_column("second", table["text"]), tmp_path / "pairs.parquet")
    write_bert_tokenizer(tmp_path / "own")
    spec = spec_of(
        folder,
        input__source=str(tmp_path / "pairs.parquet"),
        input__fields={"x": ["text", "second"], "label": "animal"},
        input__text={"max_length": 64, "tokenizer": str(tmp_path / "own")} if gives else {"max_length": 64},
    )
    with open_reader(spec.input) as reader:
        read = TrainTexts.read(spec, reader, None)
    types = read.epochs.tokens.types
    bucket = read.epochs.buckets[-1]
    given = bucket.layout.unpack(read.epochs.tokens.rows(np.array([0]), bucket.layout, bucket.tokens))
    assert ("token_type_ids" in given) is (types is not None) is gives
    if types is not None:
        assert set(types.tolist()) == {0, 1}


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_f1_is_that_of_scikit_learn(classes: int) -> None:
    """Of the second class if there are two, else the mean over the classes that occur; over several batches."""
    draw = np.random.default_rng(classes)
    labels, answers = draw.integers(0, classes, 50), draw.integers(0, max(2, classes - 1), 50)
    score = F1(classes, CPU)
    for part in range(0, 50, 20):
        score.count(torch.from_numpy(answers[part : part + 20]), torch.from_numpy(labels[part : part + 20]))
    average = "binary" if classes == 2 else "macro"
    assert score.value() == pytest.approx(f1_score(labels, answers, average=average))
    assert F1(classes, CPU).value() == 0


def test_a_new_head_is_no_trouble(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The library does not complain that weights are missing, nor that layers are not sharded."""
    loggers = [logging.getLogger("transformers"), logging.getLogger("transformers.modeling_utils")]
    for logger in loggers:  # the library lets nothing through to the root
        logger.addHandler(caplog.handler)
    try:
        build(as_classifier(spec_of(folder).model, 2), new_head=True)
    finally:
        for logger in loggers:
            logger.removeHandler(caplog.handler)
    assert [record.message for record in caplog.records if record.name.startswith("transformers")] == []


# ---- against plain PyTorch


def by_hand(spec: specs.JobSpec, *, accumulate: int = 1) -> tuple[nn.Module, list[float]]:
    """The same training in plain PyTorch: the module, and the loss of each step."""
    train = spec.train
    assert train is not None
    module = build(as_classifier(spec.model, 2), new_head=True).train()
    assert train.validation is not None
    held_spec = spec.input.model_copy(update={"source": train.validation.source})
    with open_reader(spec.input) as reader, open_reader(held_spec) as held_out:
        epochs = TrainTexts.read(spec, reader, held_out).epochs
    small = [p for n, p in module.named_parameters() if p.dim() < 2]
    large = [p for n, p in module.named_parameters() if p.dim() >= 2]
    groups = [{"params": large, "weight_decay": 0.1}, {"params": small, "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, lr=1.0)
    torch.manual_seed(spec.model.seed)
    steps = train.epochs * -(-epochs.sampler.batches // accumulate)
    losses: list[float] = []
    for epoch in range(1, train.epochs + 1):
        batches = epochs.groups(epoch)
        for first in range(0, len(batches), accumulate):
            opt.zero_grad()
            total, seen = 0.0, 0
            for group in batches[first : first + accumulate]:
                bucket = epochs.buckets[group.bucket]
                rows = bucket.layout.unpack(epochs.tokens.rows(group.records, bucket.layout, bucket.tokens))
                ids = torch.from_numpy(rows["input_ids"].astype(np.int64))
                mask = torch.arange(bucket.tokens) < torch.from_numpy(rows["attention_mask"].copy())[:, None]
                logits = module(input_ids=ids, attention_mask=mask.long())["logits"]
                loss = nn.functional.cross_entropy(logits, torch.from_numpy(epochs.tokens.labels[group.records]))
                (loss / accumulate).backward()
                total, seen = total + float(loss.detach()) * len(ids), seen + len(ids)
            step = len(losses)
            for part in opt.param_groups:
                part["lr"] = 0.01 * ((step + 1) / 3 if step < 3 else 1 - (step - 3) / (steps - 3))
            opt.step()
            losses.append(total / seen)
    return module, losses


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_curve_of_plain_pytorch(folder: Path, accumulate: int) -> None:
    """Two buckets, a short last batch, dropout, decay groups, warm-up and linear decay, with and without accumulation:
    the same losses and weights, to rounding.
    """
    spec = spec_of(folder, output=f"plain-{accumulate}/net", train__accumulate=accumulate)
    module, losses = by_hand(spec, accumulate=accumulate)
    attempt = Attempt(spec)
    outcome = attempt.run()
    assert attempt.said("fallback") == []
    assert [bucket["length"] for bucket in outcome.schedule["buckets"]] == [32, 16]
    assert [line["loss"] for line in metrics(spec.output.path, "step")] == pytest.approx(losses, rel=1e-4)
    transformers = pytest.importorskip("transformers")
    made = transformers.AutoModelForSequenceClassification.from_pretrained(spec.output.path)
    for name, tensor in made.state_dict().items():
        if name.endswith("key.bias"):
            continue  # softmax cancels it: its gradient is rounding alone, which Adam makes as large as any
        torch.testing.assert_close(tensor, module.state_dict()[name], rtol=1e-2, atol=1e-4)


# ---- what a job does


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[str, str]:
    """What an undisturbed training publishes."""
    spec = spec_of(folder, output="undisturbed/net")
    assert Attempt(spec).run().stop is Stop.GO
    return digests(folder / "undisturbed/net")


def test_all_buckets_are_stored_and_found_again(folder: Path, undisturbed: dict[str, str]) -> None:
    """The second training builds nothing, and gives the same bytes."""
    spec = spec_of(folder, output="again/net")
    outcome = Attempt(spec, home=folder / "homes" / "undisturbed").run()
    assert outcome.schedule["hit"] == "stored"
    assert [bucket["hit"] for bucket in outcome.schedule["buckets"]] == ["stored", "stored"]
    assert len({bucket["key"] for bucket in outcome.schedule["buckets"]}) == 2
    assert digests(spec.output.path) == undisturbed


@pytest.mark.parametrize("number", [1, 4, 7, 9, 12, 16])
def test_stopped_and_resumed(folder: Path, undisturbed: dict[str, str], number: int) -> None:
    """A training that is told to stop, after steps of either bucket or in a validation, goes on bit for bit."""
    spec = spec_of(folder, output=f"stopped-{number}/net")
    home = folder / "homes" / "undisturbed"
    first = Attempt(spec, stop=lambda asked: Stop.DRAIN if asked >= number else Stop.GO, home=home)
    assert first.run().stop is Stop.DRAIN
    second = Attempt(spec, number=2, home=home)
    assert second.run().stop is Stop.GO
    (said,) = second.said("resumed")
    assert "not bit for bit" not in said
    assert digests(spec.output.path) == undisturbed


KILLED = """
import os, signal, sys, time
from pathlib import Path
from nimble_jobs.workloads import Stop
from tests.text_trainings import spec_of
from tests.trainings import Attempt

folder, number = Path(sys.argv[1]), int(sys.argv[2])
output = folder / "killed"

def stop(asked):
    if asked == number:
        while not list(output.glob(".net.training/*/step-*")):
            time.sleep(0.001)  # steps are faster here than the disk
        os.kill(os.getpid(), signal.SIGKILL)
    return Stop.GO

Attempt(spec_of(folder, output="killed/net"), stop=stop, home=folder / "homes" / "undisturbed").run()
"""


def test_killed_and_resumed(folder: Path, undisturbed: dict[str, str]) -> None:
    """SIGKILL after a step: the next attempt goes on from the last checkpoint and publishes the same bytes."""
    command = [sys.executable, "-c", KILLED, str(folder), "8"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = prefork.run(command, cwd=Path(__file__).parents[2], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    spec = spec_of(folder, output="killed/net")
    assert not spec.output.path.exists()
    second = Attempt(spec, number=2, home=folder / "homes" / "undisturbed")
    assert second.run().stop is Stop.GO
    assert second.said("resumed")
    assert digests(spec.output.path) == undisturbed


def test_figures_and_files(folder: Path, undisturbed: dict[str, str]) -> None:
    """Accuracy and F1 of the held-out texts are those of the published model, which knows the names of its classes."""
    path = folder / "undisturbed/net"
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= undisturbed.keys()
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model, info = transformers.AutoModelForSequenceClassification.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"]
    assert model.config.id2label == {0: "cat", 1: "dog"}
    table = pq.read_table(folder / "held-out.parquet")
    given = tokenizer(table["text"].to_pylist(), padding=True, truncation=True, max_length=32, return_tensors="pt")
    with torch.no_grad():
        top1 = model(**given).logits.argmax(1).tolist()
    labels = [model.config.label2id[name] for name in table["animal"].to_pylist()]
    last = metrics(path, "epoch")[-1]
    assert last["val_accuracy"] == pytest.approx(np.mean(np.array(top1) == labels))
    assert last["val_f1"] == pytest.approx(f1_score(labels, top1))


def test_validations_are_replayed_bucket_by_bucket(
    folder: Path, undisturbed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: built, then stored. What they measure is what eager measures."""
    monkeypatch.setattr(validation, "able", lambda _: SimpleNamespace(graphs=True))
    measured = [metrics(folder / "undisturbed" / "net", "epoch")[-1]]
    for number in (1, 2):
        spec = spec_of(folder, output=f"validated-{number}/net")
        attempt = Attempt(spec, home=folder / "homes" / "validated")
        assert attempt.run().schedule["validation"] == "schedule"
        assert attempt.said("fallback") == []
        measured.append(metrics(spec.output.path, "epoch")[-1])
    for name in ("val_loss", "val_accuracy", "val_f1"):
        assert measured[1][name] == measured[2][name] == pytest.approx(measured[0][name], rel=1e-3)


def test_bf16_and_three_classes_of_numbers(folder: Path, tmp_path: Path) -> None:
    """Labels that are numbers are classes by that number; the best epoch by F1 is kept."""
    for name, count, seed in (("train", 30, 2), ("held-out", 12, 3)):
        write_texts(tmp_path / f"{name}.parquet", count, seed=seed, names=("0", "1", "2"))
        table = pq.read_table(tmp_path / f"{name}.parquet")
        numbers = pa.array([int(label) for label in table["animal"].to_pylist()])
        pq.write_table(table.set_column(2, "animal", numbers), tmp_path / f"{name}.parquet")
    spec = spec_of(
        folder,
        output="numbers/net",
        input__source=str(tmp_path / "train.parquet"),
        model__dtype="bf16",
        schedule__on_miss="eager",
        train__validation={"source": str(tmp_path / "held-out.parquet")},
        train__checkpoint={"every_epochs": 1, "best": "val_f1"},
    )
    Attempt(spec).run()
    config = json.loads((spec.output.path / "config.json").read_text())
    assert config["id2label"] == {"0": "0", "1": "1", "2": "2"}
    assert config["architectures"] == ["BertForSequenceClassification"]
    assert (spec.output.path / "last.safetensors").exists()
    assert 0 <= metrics(spec.output.path, "epoch")[-1]["val_f1"] <= 1


def test_bad_records_are_left_out_and_counted(folder: Path, tmp_path: Path) -> None:
    """A text that is null and a label that is missing are bad records, once in each epoch."""
    table = pq.read_table(folder / "train.parquet")
    texts, labels = table["text"].to_pylist(), table["animal"].to_pylist()
    texts[4], labels[9] = None, None
    pq.write_table(pa.table({"id": table["id"], "text": texts, "animal": labels}), tmp_path / "holes.parquet")
    spec = spec_of(
        folder,
        output="holes/net",
        input__source=str(tmp_path / "holes.parquet"),
        schedule__on_miss="eager",
        run={"error_threshold": 0.1},
    )
    Attempt(spec).run()
    errors = [json.loads(line) for line in (spec.output.path / "errors.jsonl").read_text().splitlines()]
    assert [error["id"] for error in errors] == ["t-4", "t-9"]
    with pytest.raises(DataError, match="2 of 45 records are bad"):
        Attempt(spec_of(folder, output="strict/net", input__source=str(tmp_path / "holes.parquet"))).run()


def changed(table: pa.Table, path: Path, **columns: list[object]) -> str:
    for name, values in columns.items():
        table = table.set_column(table.column_names.index(name), name, pa.array(values))
    pq.write_table(table, path)
    return str(path)


def test_labels_that_make_no_classes(folder: Path, tmp_path: Path) -> None:
    """One class alone, numbers too large to be classes, and held-out labels that the training lacks are refused."""
    table = pq.read_table(folder / "train.parquet")
    one = changed(table, tmp_path / "one.parquet", animal=["cat"] * RECORDS)
    with pytest.raises(DataError, match=r"input\.fields\.label: found 'cat' alone; expected at least two classes"):
        Attempt(spec_of(folder, output="one/net", input__source=one)).run()
    large = changed(table, tmp_path / "large.parquet", animal=[0] * (RECORDS - 1) + [70_000])
    with pytest.raises(DataError, match=r"found the label 70000 of record t-44; expected below 10000"):
        Attempt(spec_of(folder, output="large/net", input__source=large, train__validation=None)).run()
    numbers = changed(table, tmp_path / "numbers.parquet", animal=[i % 2 for i in range(RECORDS)])
    held = pq.read_table(folder / "held-out.parquet")
    other = changed(held, tmp_path / "other.parquet", animal=[2] * HELD_OUT)
    spec = spec_of(folder, output="other/net", input__source=numbers, train__validation={"source": other})
    with pytest.raises(DataError, match=r"train\.validation\.source: found the label 2 of record t-0; expected 0 to 1"):
        Attempt(spec).run()


def test_a_model_that_cannot_classify_texts(folder: Path, tmp_path: Path) -> None:
    """Says what kind it is, before anything is built."""
    write_bert(tmp_path / "odd")
    path = tmp_path / "odd" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "vit"}))
    with pytest.raises(ModelError, match="cannot classify texts with a model of type 'vit'"):
        as_classifier(spec_of(folder, model__source=f"transformers:{tmp_path / 'odd'}").model, 2)


def test_weights_that_lack_more_than_a_head_are_refused(folder: Path, tmp_path: Path) -> None:
    """A new head is all that a training may begin with; without a head of its own a model is no classifier."""
    from safetensors.torch import load_file, save_file

    write_bert(tmp_path / "holes")
    weights = tmp_path / "holes" / "model.safetensors"
    state = load_file(weights)
    save_file({n: t for n, t in state.items() if "layer.1.output.dense" not in n}, weights, metadata={"format": "pt"})
    spec = as_classifier(spec_of(folder, model__source=f"transformers:{tmp_path / 'holes'}").model, 2)
    with pytest.raises(ModelError, match=r"do not fit BertForSequenceClassification: 2 missing_keys"):
        build(spec, new_head=True)
    whole = as_classifier(spec_of(folder).model, 2)
    with pytest.raises(ModelError, match=r"missing_keys \(classifier\.bias, classifier\.weight\)"):
        build(whole)


def test_several_steps_are_told_apart_by_the_size_of_their_records(folder: Path) -> None:
    """A batch that no step takes is refused, and so are two steps of one size."""

    class Step:
        schedule = fallback = None
        schedules: dict[str, object] = {}  # noqa: RUF012  # nobody writes to it
        inputs = {"x": torch.zeros(2, 16)}  # noqa: RUF012  # as above

    with pytest.raises(EngineError, match="same size"):
        SeveralSteps([Step(), Step()])  # type: ignore[list-item]
    with pytest.raises(EngineError, match="no training step takes records of 24 values"):
        SeveralSteps([Step()]).run(torch.zeros(2, 24), torch.zeros(2), 0.1)  # type: ignore[list-item]
