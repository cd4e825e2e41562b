"""Models with several inputs on a real GPU: one upload a batch, the numbers of the model, and masks as inputs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nimble_jobs import planner
from nimble_jobs.engine.difference import relative_norm
from nimble_jobs.engine.verify import TOLERANCE
from nimble_jobs.job import Hit
from nimble_jobs.models.packed import Packed
from nimble_jobs.packing import Layout, Part, text_layout
from nimble_jobs.planner import Request
from nimble_jobs.planner.jobs.loaded import build_module
from nimble_jobs.planner.module.limits import find_limits
from nimble_jobs.planner.sources.source import Source, Variants, record_source
from nimble_jobs.preprocess import of_words
from nimble_jobs.spec import ModelSpec, ScheduleSpec
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.residency import Residents

CODE = """
import torch
from torch import nn

class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU())
        self.words, self.age, self.head = nn.Embedding(500, 32), nn.Linear(1, 32), nn.Linear(32, 8)

    def forward(self, image, meta, mask):
        flags = mask.unsqueeze(-1).to(image.dtype)
        text = (self.words(meta["ids"]) * flags).sum(1) / flags.sum(1)
        features = self.image(image).mean((2, 3)) + text + self.age(meta["age"].unsqueeze(1))
        return {"made": self.head(features), "parts": [text, features]}

def mixed():
    return Mixed()
"""
STEPS = of_words((64, 64, 3), "uint8", "hwc, /255, mean 0.5, std 0.25")
MIXED = Layout(
    (
        Part(path="image", shape=(64, 64, 3), dtype="uint8", gives="float", preprocess=STEPS),
        Part(path="meta.ids", shape=(12,), dtype="uint16"),
        Part(path="meta.age", shape=(), dtype="float64", gives="float"),
        Part(path="mask", shape=(12,), make="mask_right", gives="bool"),
    )
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home"))) as opened:
        yield opened


def asked(folder: Path, kind: str, **schedule: Any) -> Request:
    (folder / "net.py").write_text(CODE)
    return Request(
        model=ModelSpec(source=f"python:{folder / 'net.py'}:mixed", dtype=kind),  # type: ignore[arg-type]
        shape=(MIXED.nbytes,),
        dtype="uint8",
        batch_size=8,
        packing=MIXED,
        schedule=ScheduleSpec(**schedule),
        allowed_python=(folder,),
    )


def mixed_rows(count: int, seed: int) -> torch.Tensor:
    random = np.random.default_rng(seed)
    values = {
        "image": random.integers(0, 256, (count, 64, 64, 3)),
        "meta.ids": random.integers(0, 500, (count, 12)),
        "meta.age": random.normal(size=count),
        "mask": random.integers(1, 13, count),
    }
    return torch.from_numpy(MIXED.pack(values))


def test_each_stored_type_is_unpacked_as_on_the_host(device: torch.device) -> None:
    """Of rows at any place of a batch; equal bits."""
    kinds = ["bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "float16", "float32", "float64"]
    parts = [
        Part(
            path=f"a{n}",
            shape=(n % 4 + 1,),
            dtype=dtype,
            gives="float" if dtype.startswith("float") else "bool" if dtype == "bool" else "integer",
        )
        for n, dtype in enumerate(kinds)
    ]
    masks = [Part(path="right", shape=(9,), make="mask_right"), Part(path="left", shape=(9,), make="mask_left")]
    layout = Layout((*parts, *masks))
    rows = np.random.default_rng(0).integers(0, 2, (17, layout.nbytes)).astype(np.uint8)
    module = Packed(torch.nn.Identity(), layout, torch.float32, torch.device("cpu"))
    there = Packed(torch.nn.Identity(), layout, torch.float32, device)
    wanted = module.arguments(torch.from_numpy(rows))
    for path, found in there.arguments(torch.from_numpy(rows).to(device)).items():
        torch.testing.assert_close(found.cpu(), wanted[path], atol=0, rtol=0)


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("kind", ["fp16", "fp32"])
def test_a_schedule_gives_what_the_model_gives(
    store: Store, device: torch.device, tmp_path: Path, kind: str, in_flight: int
) -> None:
    """Built, resident and loaded again; with several replays in flight, each batch has its own outputs."""
    wanted = asked(tmp_path, kind, in_flight=in_flight)
    residents = Residents(2**34)
    batches = [mixed_rows(8, seed) for seed in range(7)]
    module = build_module(wanted, device)
    with torch.no_grad():
        expected = [module(rows.to(device)) for rows in batches]
    for hit, place in ((Hit.MISS, residents), (Hit.RESIDENT, residents), (Hit.STORED, Residents(2**34))):
        prepared = planner.prepare(wanted, device=device, store=store, residents=place)
        assert (prepared.hit, prepared.loaded.fallback) == (hit, None)
        loaded = prepared.loaded
        left = loaded.further.left if loaded.further is not None else 0
        assert (len(loaded.instances), left) == ((1, in_flight - 1) if hit is Hit.STORED else (in_flight, 0))
        arrivals = loaded.arrivals
        arrivals.begin()
        arrived = ((arrivals.upload(rows), number) for number, rows in enumerate(batches))
        for landed in loaded.run(arrived):
            assert list(landed.outputs) == ["made", "parts.0", "parts.1"]
            made = expected[landed.beside]["made"].cpu()
            assert relative_norm(landed.outputs["made"], made) < TOLERANCE[kind]
            landed.release()
        arrivals.end()


def test_compiled_kernels_take_rows(device: torch.device, tmp_path: Path) -> None:
    """Inductor compiles the module whole, with images in the layout of the weights."""
    module = build_module(asked(tmp_path, "fp16"), device)
    rows = mixed_rows(8, 0).to(device)
    for source in (Source(kernels="inductor", layout="given"), Source(kernels="inductor", layout="channels-last")):
        recorded = record_source(Variants(module).use(source), source, {"x": rows}, device)
        assert recorded.kernels


def test_limits_are_found_on_the_device(device: torch.device, tmp_path: Path) -> None:
    """Each input has its own."""
    wanted = asked(tmp_path, "fp16")
    limits = find_limits(build_module(wanted, device), wanted.input_shape, device)
    rows = mixed_rows(3, 0).numpy()
    MIXED.fields(rows)["meta.ids"][1, 5] = 500
    assert list(limits.wrong(rows)) == [1]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["fp16", "fp32"])
def test_a_mask_is_an_input_of_the_schedule(
    store: Store, device: torch.device, tmp_path: Path, kind: str, attention: str
) -> None:
    """BERT with masks of several shapes agrees with texts called one by one, without a mask."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    config = transformers.BertConfig(vocab_size=300, max_position_embeddings=64, **sizes)
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    layout = text_layout(32, vocabulary=300, token_types=True)
    model = ModelSpec(
        source=f"transformers:{tmp_path / 'bert'}",
        args={"attn_implementation": attention},
        dtype=kind,  # type: ignore[arg-type]
    )
    wanted = Request(model=model, shape=(layout.nbytes,), dtype="uint8", batch_size=4, packing=layout)
    made = planner.prepare(wanted, device=device, store=store, residents=Residents(2**34))
    assert made.loaded.fallback is None
    random = np.random.default_rng(0)
    alone = build_module(wanted, device).model
    loaded = made.loaded
    for lengths in ([32] * 4, [1] * 4, [3, 17, 32, 1]):
        values = {
            "input_ids": random.integers(0, 300, (4, 32)),
            "token_type_ids": random.integers(0, 2, (4, 32)),
            "attention_mask": np.array(lengths),
        }
        loaded.arrivals.begin()
        arrived = [(loaded.arrivals.upload(torch.from_numpy(layout.pack(values))), None)]
        (landed,) = loaded.run(arrived)
        for row, length in enumerate(lengths):
            ids, types = (
                torch.from_numpy(values[name][row : row + 1, :length]).to(device)
                for name in ("input_ids", "token_type_ids")
            )
            with torch.no_grad():
                expected = alone(input_ids=ids, token_type_ids=types)["last_hidden_state"][0].cpu()
            found = landed.outputs["last_hidden_state"][row, :length]
            assert relative_norm(found, expected) < TOLERANCE[kind]
        landed.release()
        loaded.arrivals.end()
