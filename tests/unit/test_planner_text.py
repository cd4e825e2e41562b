"""Schedules of text models: pooled vectors and outputs of pairs equal the model's own, one record at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nimble_jobs.job import Hit
from nimble_jobs.models.build import build
from nimble_jobs.models.pooled import Pooled
from nimble_jobs.packing import Layout, Part, text_layout
from nimble_jobs.planner import Request, prepare
from nimble_jobs.planner.jobs.background import order_of, request_of_order
from nimble_jobs.planner.jobs.replay import request_of
from nimble_jobs.planner.keys.request import key_parts
from nimble_jobs.planner.lookup.stored import Taken, read_stored
from nimble_jobs.preprocess import of_words
from nimble_jobs.sentence import Pooling, resolve
from nimble_jobs.spec import ModelSpec, ScheduleSpec
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve as home
from nimble_jobs.worker.residency import Residents
from tests.one_batch import outputs_of
from tests.text_models import seeded, write_bert, write_clip, write_decoder, write_sentence_model

pytest.importorskip("transformers")

CPU = torch.device("cpu")
LENGTHS = [8, 3, 1, 5, 0]  # the last row is empty, as where a batch is not full


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(home(str(tmp_path / "home"))) as opened:
        yield opened


def asked(folder: Path, layout: Layout, **fields: Any) -> Request:
    model = ModelSpec(source=f"transformers:{folder}", **fields.pop("model", {}))
    given = {"shape": (layout.nbytes,), "dtype": "uint8", "packing": layout, "batch_size": len(LENGTHS)}
    return Request(model=model, **given, **fields)


def tokens(layout: Layout, below: int = 39) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(0).integers(4, below, (len(LENGTHS), 8))
    return {"input_ids": ids, "attention_mask": np.array(LENGTHS)}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("mode", ["mean", "last", "cls", "max"])
@pytest.mark.parametrize("write", [write_bert, write_decoder])
def test_pooled_vectors_equal_those_of_each_text_alone(
    write: Any, mode: str, attention: str, store: Store, tmp_path: Path
) -> None:
    """Encoders and decoders, padded and with an empty row, against the model without padding and without a mask."""
    folder, layout = write(tmp_path / "m"), text_layout(8, vocabulary=40)
    pooling = Pooling(modes=(mode,), normalize=True)
    request = asked(folder, layout, pooling=pooling, model={"args": {"attn_implementation": attention}})
    made = prepare(request, device=CPU, store=store, residents=Residents(2**30))
    assert made.loaded.fallback is None
    assert made.loaded.instances
    given = tokens(layout)
    found = outputs_of(made.loaded, torch.from_numpy(layout.pack(given)))["embedding"]
    assert found.dtype == torch.float32
    assert found.isfinite().all()
    alone = Pooled(build(request.model, headless=True), pooling)
    for row, length in enumerate(LENGTHS[:-1]):
        ids = torch.from_numpy(given["input_ids"][row : row + 1, :length])
        with torch.no_grad():
            vectors = alone.model(input_ids=ids)["last_hidden_state"][0]
        plain = {"mean": vectors.mean(0), "last": vectors[-1], "cls": vectors[0], "max": vectors.amax(0)}[mode]
        torch.testing.assert_close(found[row], plain / plain.norm(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_pooling_is_in_single_precision_for_every_model(dtype: Any, store: Store, tmp_path: Path) -> None:
    """So the vector has type and length of single precision."""
    folder, layout = write_bert(tmp_path / "m"), text_layout(8, vocabulary=40)
    request = asked(folder, layout, pooling=Pooling(modes=("mean",), normalize=True), model={"dtype": dtype})
    made = prepare(request, device=CPU, store=store, residents=Residents(2**30))
    found = outputs_of(made.loaded, torch.from_numpy(layout.pack(tokens(layout))))["embedding"]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found[:-1].norm(dim=1), torch.ones(len(LENGTHS) - 1))


@pytest.mark.parametrize(
    ("batches", "progressive", "loads"),
    [(None, "auto", True), (1000.0, "auto", True), (4.0, "auto", False), (4.0, True, True)],
)
def test_a_stored_schedule_is_loaded_where_it_saves_more_than_its_check_costs(
    batches: Any, progressive: Any, loads: bool, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the check takes five batches' time. Unless the spec says when to move, a job of few batches stays in
    eager, and says why.
    """
    folder, layout = write_bert(tmp_path / "m"), text_layout(8, vocabulary=40)
    request = asked(folder, layout, pooling=Pooling(modes=("mean",)))
    prepare(request, device=CPU, store=store, residents=Residents(2**30)).loaded.close()

    def timed(key: str, store: Store) -> Any:
        found = read_stored(key, store)
        assert isinstance(found, Taken)
        schedule = replace(found.value.schedule, eager_us=2e5, replay_us=1e5, runs="schedule")
        return Taken(value=replace(found.value, schedule=schedule))

    monkeypatch.setattr("nimble_jobs.planner.jobs.take.read_stored", timed)
    asking = replace(request, batches=batches, schedule=ScheduleSpec(progressive=progressive))
    made = prepare(asking, device=CPU, store=store, residents=Residents(2**30))
    assert made.hit is Hit.STORED
    assert made.loaded.fallback is None
    assert bool(made.loaded.instances) is loads
    why = "in eager, as its check takes 0.7 s, and about 4 full batches would save 0.4 s"
    assert made.loaded.spared == (None if loads else why)
    given = torch.from_numpy(layout.pack(tokens(layout)))
    assert outputs_of(made.loaded, given)["embedding"].isfinite().all()


def test_a_folder_of_sentence_transformers_has_a_schedule_of_its_own(store: Store, tmp_path: Path) -> None:
    """Layers of the folder are part of it. The request can be rebuilt from its key, and from the order to a builder."""
    pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    layers = (modules.Pooling(16, ("cls", "mean")), seeded(modules.Dense(32, 8)), modules.Normalize())
    folder = write_sentence_model(tmp_path / "m", write_bert(tmp_path / "base"), *layers)
    layout = text_layout(8, vocabulary=40)
    request = asked(folder, layout, pooling=resolve(folder, None, None))
    built, loaded = (prepare(request, device=CPU, store=store, residents=Residents(2**30)) for _ in range(2))
    assert [built.hit, loaded.hit] == [Hit.MISS, Hit.STORED]
    assert built.loaded.fallback is None
    rows = torch.from_numpy(layout.pack(tokens(layout)))
    first, second = (outputs_of(p.loaded, rows)["embedding"].clone() for p in (built, loaded))
    assert torch.equal(first, second)
    assert tuple(first.shape) == (len(LENGTHS), 8)
    parts = key_parts(request, CPU)
    other = key_parts(replace(request, pooling=resolve(folder, "max", None)), CPU)
    assert {name for name in parts if parts[name] != other[name]} == {"outputs.pooling"}
    assert request_of_order(order_of("k", request, CPU)).pooling == request.pooling
    spec = {**parts, "model.source": "torchvision:resnet18"}  # a folder cannot be told from a key
    assert request_of(spec, (), ()).pooling == request.pooling


def test_images_and_texts_of_a_record_are_compared_with_each_other_alone(store: Store, tmp_path: Path) -> None:
    """CLIP: each output has a row for each record, which depends on no other record."""
    folder = write_clip(tmp_path / "m")
    steps = of_words((3, 16, 16), "uint8", "chw, /255, mean 0.5, std 0.25")
    pixels = Part(path="pixel_values", shape=(3, 16, 16), dtype="uint8", gives="float", preprocess=steps)
    layout = Layout((pixels, *text_layout(8, vocabulary=40).parts))
    made = prepare(asked(folder, layout), device=CPU, store=store, residents=Residents(2**30))
    assert made.loaded.fallback is None
    given = tokens(layout)
    for row, length in enumerate(LENGTHS):
        given["input_ids"][row, max(0, length - 1)] = 39
    given["pixel_values"] = np.random.default_rng(1).integers(0, 256, (len(LENGTHS), 3, 16, 16)).astype(np.uint8)
    found = outputs_of(made.loaded, torch.from_numpy(layout.pack(given)))
    count = len(LENGTHS)
    assert {name: tuple(t.shape) for name, t in found.items()} == {
        "logits_per_image": (count,), "logits_per_text": (count,),
        "text_embeds": (count, 8), "image_embeds": (count, 8),
    }  # fmt: skip
    model = build(ModelSpec(source=f"transformers:{folder}"))
    for row, length in enumerate(LENGTHS[:-1]):
        ids = torch.from_numpy(given["input_ids"][row : row + 1, :length])
        image = (torch.from_numpy(given["pixel_values"][row : row + 1]).float() / 255 - 0.5) / 0.25
        with torch.no_grad():
            alone = model(input_ids=ids, pixel_values=image)
        for name, output in alone.items():
            torch.testing.assert_close(found[name][row], output[0], atol=1e-5, rtol=1e-4)
