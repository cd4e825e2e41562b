"""What comes out of text models on a real GPU: pooled in the captured program, and scored beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nimble_jobs.engine.verify import TOLERANCE
from nimble_jobs.models.build import build
from nimble_jobs.models.classes import Classes
from nimble_jobs.models.pooled import Pooled, pool
from nimble_jobs.packing import text_layout
from nimble_jobs.planner import Loaded, Request, prepare
from nimble_jobs.sentence import Pooling
from nimble_jobs.sentence.pooling import MODES
from nimble_jobs.spec import ModelSpec, ScheduleSpec
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.residency import Residents
from nimble_jobs.workloads.heads import Heads
from tests.text_models import write_bert, write_decoder

pytest.importorskip("transformers")

LENGTHS = [32, 3, 1, 17, 0]  # the last row is empty, as where a batch is not full
LAYOUT = text_layout(32, vocabulary=40)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home"))) as opened:
        yield opened


def tokens() -> dict[str, np.ndarray]:
    ids = np.random.default_rng(0).integers(4, 40, (len(LENGTHS), 32))
    return {"input_ids": ids, "attention_mask": np.array(LENGTHS)}


def ready(folder: Path, device: torch.device, store: Store, dtype: Any, pooling: Pooling | None = None) -> Loaded:
    request = Request(
        model=ModelSpec(source=f"transformers:{folder}", dtype=dtype),
        shape=(LAYOUT.nbytes,),
        dtype="uint8",
        packing=LAYOUT,
        batch_size=len(LENGTHS),
        pooling=pooling,
        schedule=ScheduleSpec(progressive=False, fuse="off"),
    )
    made = prepare(request, device=device, store=store, residents=Residents(2**33))
    assert made.loaded.fallback is None
    return made.loaded


def made_of(loaded: Loaded, head: Any = dict) -> dict[str, torch.Tensor]:
    loaded.arrivals.begin()
    (landed,) = loaded.run([(loaded.arrivals.upload(torch.from_numpy(LAYOUT.pack(tokens()))), None)], head)
    return {name: tensor.clone() for name, tensor in landed.outputs.items()}


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("mode", ["mean", "last", "cls", "max"])
@pytest.mark.parametrize("write", [write_bert, write_decoder])
def test_pooled_vectors_equal_those_of_each_text_alone(
    write: Any, mode: str, dtype: str, device: torch.device, store: Store, tmp_path: Path
) -> None:
    """float32 from models of every type, padded and with an empty row, against each text without padding."""
    folder, pooling = write(tmp_path / "m"), Pooling(modes=(mode,), normalize=True)
    found = made_of(ready(folder, device, store, dtype, pooling), Heads.of(["embedding"]))["embedding"]
    assert found.dtype == torch.float32
    assert found.isfinite().all()
    model = ModelSpec(source=f"transformers:{folder}", dtype=dtype)
    alone = Pooled(build(model, device=str(device), headless=True), pooling).to(device)
    for row, length in enumerate(LENGTHS[:-1]):
        ids = torch.from_numpy(tokens()["input_ids"][row : row + 1, :length]).to(device)
        with torch.no_grad():
            plain = alone(input_ids=ids, attention_mask=torch.ones_like(ids))["embedding"][0].cpu()
        assert float((found[row] - plain).norm() / plain.norm()) <= 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("mode", [*MODES.values()])
def test_nan_in_padding_does_not_spread(mode: str, device: torch.device) -> None:
    """Neither from padded positions nor from empty rows, on the device's kernels either."""
    mask = torch.arange(32, device=device) < torch.tensor(LENGTHS, device=device).unsqueeze(1)
    vectors = torch.randn(len(LENGTHS), 32, 64, device=device, dtype=torch.float16)
    spoiled = vectors.masked_fill(~mask.unsqueeze(-1), torch.nan)
    made = pool(spoiled, mask, mode)
    assert torch.equal(made, pool(vectors, mask, mode))
    assert not made[-1].any()


def test_probabilities_of_many_labels_are_captured(device: torch.device, store: Store, tmp_path: Path) -> None:
    """The graph after each replay gives what the same head gives on the host."""
    folder = write_bert(tmp_path / "m", cls="BertForSequenceClassification", num_labels=3)
    loaded = ready(folder, device, store, "fp32")
    for multi_label in (False, True):
        classes = Classes(names=("a", "b", "c"), multi_label=multi_label)
        head = Heads.of(["top1_label", "probability", "probabilities", "logits"], classes)
        made = made_of(loaded, head)
        expected = head({"logits": made["logits"]})
        assert torch.equal(made["top1_label"][:-1], expected["top1_label"][:-1])
        for name in ("probability", "probabilities"):
            torch.testing.assert_close(made[name], expected[name], rtol=1e-5, atol=1e-6)
