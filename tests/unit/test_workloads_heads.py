"""What columns are made of: classes and their probability, from scores of any float type."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nimble_jobs.errors import DataError, ModelError
from nimble_jobs.models.classes import Classes, classes_of
from nimble_jobs.spec import loads
from nimble_jobs.spec.model import ModelSpec
from nimble_jobs.workloads.columns import Columns
from nimble_jobs.workloads.heads import Heads, load_kernels


@given(st.integers(1, 6), st.integers(1, 12), st.sampled_from(["float16", "bfloat16", "float32"]), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_classes_and_probabilities_are_those_of_numpy(rows: int, classes: int, dtype: str, seed: int) -> None:
    """Few different scores, so that many are equal: the first class counts."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.integers(-3, 3, (rows, classes)).astype(np.float32)).to(getattr(torch, dtype))
    made = Heads.of(["id", "top1", "top5", "probability", "logits"])({"output": logits})
    plain = logits.float().numpy()
    assert made["top1"].tolist() == plain.argmax(axis=1).tolist()
    assert made["top5"].tolist() == np.argsort(-plain, axis=1, kind="stable")[:, :5].tolist()
    shares = np.exp(plain) / np.exp(plain).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(made["probability"].numpy(), shares.max(axis=1), rtol=1e-5)
    assert made["logits"] is logits
    assert "id" not in made


def test_columns_leave_padding_out_and_copy_what_will_be_written_over() -> None:
    """Half precision becomes float32, as few readers know it."""
    columns = Columns(["id", "embedding", "label"])
    x = torch.arange(6.0, dtype=torch.float16).view(3, 2)
    columns.add({"embedding": x}, ["a", "b"], np.array([4, 5]))
    x.zero_()
    columns.add({"embedding": x}, ["c"], np.array([6]))
    found = columns.finish()
    assert found["id"] == ["a", "b", "c"]
    assert np.asarray(found["embedding"]).tolist() == [[0, 1], [2, 3], [0, 0]]
    assert np.asarray(found["embedding"]).dtype == np.float32
    assert np.asarray(found["label"]).tolist() == [4, 5, 6]


@pytest.mark.parametrize("rows", [1, 3, 5, 8])
def test_rows_that_are_not_those_of_the_batch(rows: int) -> None:
    """A full batch has four; the last one may have two, or be filled up. More rows than that are not records."""
    columns = Columns(["n"])
    for fits in (2, 4):
        columns.add({"n": torch.zeros(fits, 6)}, ["a", "b"], None, batch_size=4)
    with pytest.raises(ModelError, match=rf"shape \[{rows}, 6\] for a batch of records; expected one row per record"):
        columns.add({"n": torch.zeros(rows, 6)}, ["a", "b"], None, batch_size=4)


def test_what_the_model_does_not_return_is_named() -> None:
    """With what it returns instead."""
    outputs = {"features": torch.zeros(2, 3, 4)}
    with pytest.raises(ModelError, match=r"top1.*\[batch, classes\]; the model returns features \[2, 3, 4\]"):
        Heads.of(["top1"])(outputs)
    with pytest.raises(ModelError, match="the model returns no 'mask'; it returns features"):
        Heads.of(["mask"])(outputs)
    with pytest.raises(ModelError, match="no 'mask', because its head is left out to pool tokens into embedding; it"):
        Heads.of(["mask"], headless=True)(outputs)
    with pytest.raises(ModelError, match="one row per record"):
        Columns(["n"]).add({"n": torch.zeros(())}, ["a"], None)
    with pytest.raises(DataError, match=r"label needs input\.fields\.label"):
        Columns(["label"]).add({}, ["a"], None)


@given(st.integers(1, 6), st.integers(2, 9), st.booleans(), st.sampled_from(["float16", "float32"]), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_probabilities_follow_what_the_configuration_says(
    rows: int, count: int, multi_label: bool, dtype: str, seed: int
) -> None:
    """Shares of all classes, or each class by itself; `probability` is that of `top1`, whose name is `top1_label`."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, count, generator=generator) * 4).to(getattr(torch, dtype))
    classes = Classes(names=tuple(f"c{i}" for i in range(count)), multi_label=multi_label)
    made = Heads.of(["top1", "top1_label", "probability", "probabilities"], classes)({"logits": logits})
    plain = logits.double()
    expected = plain.sigmoid() if multi_label else plain.softmax(dim=1)
    torch.testing.assert_close(made["probabilities"].double(), expected, rtol=1e-5, atol=1e-7)
    chosen = made["probabilities"].gather(1, made["top1"].unsqueeze(1))[:, 0]
    torch.testing.assert_close(made["probability"], chosen, rtol=1e-5, atol=1e-7)
    columns = Columns(["top1_label"], classes.names)
    columns.add(made, ["a"] * rows, None)
    assert columns.finish()["top1_label"] == [f"c{i}" for i in plain.argmax(1).tolist()]


def test_a_model_of_one_class_gives_a_score() -> None:
    """As it is, float32; there is no largest class among one, unless nothing is known of the model."""
    logits = torch.tensor([[-2.5], [3.0]], dtype=torch.float16)
    one = Classes(names=("LABEL_0",))
    made = Heads.of(["score", "logits"], one)({"logits": logits})
    assert made["score"].tolist() == [-2.5, 3.0]
    assert made["score"].dtype == torch.float32
    for field in ("top1", "top1_label", "top5", "probability", "probabilities"):
        with pytest.raises(ModelError, match=f"{field} needs several classes; this model has one, so its result is sc"):
            Heads.of([field], one)({"logits": logits})
    assert Heads.of(["probability"])({"logits": logits})["probability"].tolist() == [1.0, 1.0]
    with pytest.raises(ModelError, match="score needs a model of one class; this one has 3"):
        Heads.of(["score"])({"logits": torch.zeros(2, 3)})


def test_names_of_classes_must_fit_the_scores() -> None:
    """Neither a model without names nor one with too few of them."""
    outputs = {"logits": torch.zeros(2, 3)}
    with pytest.raises(ModelError, match=r"top1_label needs names of classes; only config\.json has them"):
        Heads.of(["top1_label"])(outputs)
    with pytest.raises(ModelError, match=r"config\.json names 2 classes; the model returns 3"):
        Heads.of(["top1_label"], Classes(names=("a", "b")))(outputs)


def test_outputs_of_the_model_win_over_names_that_came_later() -> None:
    """A model that returned `score` or `probabilities` before returns them still."""
    outputs = {"score": torch.ones(2, 4), "probabilities": torch.zeros(2)}
    made = Heads.of(["score", "probabilities"])(outputs)
    assert made["score"] is outputs["score"]
    assert made["probabilities"] is outputs["probabilities"]


@pytest.mark.parametrize("name", ["pooler_output", "embedding", "start_logits", "end_logits", "image_embeds"])
def test_vectors_are_not_taken_for_scores(name: str) -> None:
    """A bare encoder has no classes, though its output has the shape of scores."""
    with pytest.raises(ModelError, match=rf"need scores of shape \[batch, classes\]; the model returns {name}"):
        Heads.of(["top1"])({name: torch.zeros(2, 3)})


def test_classes_are_those_of_the_configuration(tmp_path: Path) -> None:
    """Names by number, replaced by arguments as in transformers; LABEL_0 and so on where there are none."""
    model = ModelSpec(source=f"transformers:{tmp_path}")
    config = tmp_path / "config.json"

    def classes(held: dict[str, Any], **args: Any) -> Classes | None:
        config.write_text(json.dumps(held))
        return classes_of(model.model_copy(update={"args": args}))

    named = {"id2label": {"1": "good", "0": "bad"}}
    assert classes(named) == Classes(names=("bad", "good"))
    assert classes(named, num_labels=3) == Classes(names=("LABEL_0", "LABEL_1", "LABEL_2"))
    assert classes(named, num_labels=2) == Classes(names=("bad", "good"))
    assert classes({}) == Classes(names=("LABEL_0", "LABEL_1"))
    assert classes({"num_labels": 1}) == Classes(names=("LABEL_0",))
    assert classes({**named, "problem_type": "multi_label_classification"}) == Classes(
        names=("bad", "good"), multi_label=True
    )
    for held, said in (
        ({"id2label": ["a"]}, "id2label: expected a mapping of numbers to names"),
        ({"id2label": {"0": 1}}, "id2label: expected a mapping of numbers to names"),
        ({"id2label": {"1": "a"}}, "id2label: its numbers are not 0 to 0"),
    ):
        odd = classes(held)
        assert odd is not None
        for field, scores in (("top1_label", torch.eye(2)), ("token_labels", torch.eye(2)[None])):
            with pytest.raises(ModelError, match=re.escape(f"output.fields: {field}: {config}: {said}")):
                Heads.of([field], odd)({"logits": scores})
        made = Heads.of(["top1", "probability", "logits"], odd)({"logits": torch.eye(2)})  # which need no names
        assert made["top1"].tolist() == [0, 1]
    with pytest.raises(
        ModelError, match=re.escape(f"{config}: num_labels: found '3'; expected a whole number from 1 t")
    ):
        classes({"num_labels": "3"})
    assert classes_of(ModelSpec(source="torchvision:resnet18")) is None


def test_kernels_are_loaded_for_what_is_made_from_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns that come from the host, or as they are from the model, need none."""
    called: list[tuple[tuple[str, ...], list[int], torch.dtype]] = []

    def noted(self: Heads, outputs: dict[str, torch.Tensor]) -> None:
        [scores] = outputs.values()
        called.append((self.fields, list(scores.shape), scores.dtype))

    monkeypatch.setattr(Heads, "__call__", noted)
    text = """\
version: 1
name: heads
kind: score
model: {source: "torchvision:resnet18", dtype: fp16}
input: {source: x.npy, format: npy, batch_size: 7}
output: {path: out, format: npy, fields: [id, top1, embedding, probability]}
"""
    load_kernels(loads(text, "s.yaml", Path("/nowhere"), check_files=False), torch.device("cpu"))
    assert called == [(("top1", "probability"), [7, 1000], torch.float16)]
