"""Schedules of models with several inputs: built, stored, checked, replayed and carried like any other."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nimble_jobs.errors import ModelError
from nimble_jobs.job import Hit
from nimble_jobs.packing import Layout, Part, text_layout
from nimble_jobs.planner import Request, prepare, schedule_key
from nimble_jobs.planner.jobs.background import order_of, request_of_order
from nimble_jobs.planner.jobs.loaded import build_module
from nimble_jobs.planner.jobs.replay import replay, request_of
from nimble_jobs.planner.keys.request import key_parts
from nimble_jobs.planner.lookup.transfer import import_schedules
from nimble_jobs.planner.module.limits import find_limits
from nimble_jobs.preprocess import of_words
from nimble_jobs.spec import ModelSpec
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.bundle import write_bundle
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.residency import Residents
from tests.one_batch import outputs_of

CPU = torch.device("cpu")
CODE = """
import torch
from torch import nn

class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(50, 4), nn.Embedding(7, 4)
        self.image, self.age = nn.Linear(12, 4), nn.Linear(1, 4)

    def forward(self, image, meta, mask, scale=None):
        tokens = self.words(meta["ids"]) + self.places(meta["at"]).unsqueeze(1)
        flags = mask.unsqueeze(-1).to(tokens.dtype)
        text = (tokens * flags).sum(1) / flags.sum(1)
        picture = self.image(image.flatten(1))
        return {"sum": text + picture + self.age(meta["age"].unsqueeze(1)), "parts": [text, picture]}

def mixed():
    return Mixed()

def branches():
    class Branches(nn.Module):
        def forward(self, ids, attention_mask):
            return ids * 2.0 if attention_mask.all() else ids * 3.0
    return Branches()
"""
STEPS = of_words((2, 2, 3), "uint8", "hwc, /255")
LAYOUT = Layout(
    (
        Part(path="image", shape=(2, 2, 3), dtype="uint8", gives="float", preprocess=STEPS),
        Part(path="meta.ids", shape=(6,), dtype="uint16"),
        Part(path="meta.at", shape=(), dtype="int8"),
        Part(path="meta.age", shape=(), dtype="float64", gives="float"),
        Part(path="mask", shape=(6,), make="mask_right", gives="bool"),
    )
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home"))) as opened:
        yield opened


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(CODE)
    return path


def asked(code: Path, layout: Layout = LAYOUT, factory: str = "mixed", **fields: Any) -> Request:
    model = ModelSpec(source=f"python:{code}:{factory}")
    packed: dict[str, Any] = {"shape": (layout.nbytes,), "dtype": "uint8", "packing": layout, "batch_size": 3}
    return Request(model=model, allowed_python=(code.parent,), **{**packed, **fields})


def values(count: int = 3) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    return {
        "image": random.integers(0, 256, (count, 2, 2, 3)).astype(np.uint8),
        "meta.ids": random.integers(0, 50, (count, 6)).astype(np.uint16),
        "meta.at": random.integers(0, 7, count).astype(np.int8),
        "meta.age": random.random(count),
        "mask": np.array([6, 1, 4], dtype=np.int32),
    }


def test_a_schedule_takes_several_inputs(store: Store, code: Path, tmp_path: Path) -> None:
    """Built, loaded again, replayed from what is stored alone, and carried elsewhere; results are the model's own."""
    request = asked(code)
    residents = Residents(2**30)
    built = prepare(request, device=CPU, store=store, residents=residents)
    assert prepare(request, device=CPU, store=store, residents=residents).hit is Hit.RESIDENT
    loaded = prepare(request, device=CPU, store=store, residents=Residents(2**30))
    assert [built.hit, loaded.hit] == [Hit.MISS, Hit.STORED]
    assert built.loaded.fallback is None
    given = values()
    module = build_module(request, CPU)
    for prepared in (built, loaded):
        found = {n: t.clone() for n, t in outputs_of(prepared.loaded, torch.from_numpy(LAYOUT.pack(given))).items()}
        assert list(found) == ["sum", "parts.0", "parts.1"]
        for row in range(3):
            length = int(given["mask"][row])
            meta = {
                "ids": torch.from_numpy(given["meta.ids"][row : row + 1, :length].astype(np.int64)),
                "at": torch.from_numpy(given["meta.at"][row : row + 1].astype(np.int64)),
                "age": torch.from_numpy(given["meta.age"][row : row + 1]).float(),
            }
            pixels = torch.from_numpy(given["image"][row : row + 1]).permute(0, 3, 1, 2).float() / 255
            with torch.no_grad():
                alone = module.model(image=pixels, meta=meta, mask=torch.ones(1, length, dtype=torch.bool))
            torch.testing.assert_close(found["sum"][row], alone["sum"][0])
    (entry,) = store.schedules.list()
    again = replay(entry, device=CPU, store=store, folders=[code.parent], allowed_python=(code.parent,))
    assert again.agrees, again.said
    write_bundle(store, [entry.key], tmp_path / "b.zip", time.time())
    with open_store(resolve(str(tmp_path / "there"))) as there:
        (taken,) = import_schedules(tmp_path / "b.zip", store=there, now=time.time(), agreed=lambda _: True).schedules
        assert taken.taken
        assert prepare(request, device=CPU, store=there, residents=Residents(2**30)).hit is Hit.STORED


def test_the_key_names_each_part(code: Path) -> None:
    """A line each; the request can be rebuilt from them, and from the order to a builder."""
    request = asked(code)
    parts = key_parts(request, CPU)
    assert parts["input"] == ("[3] image uint8[2, 2, 3], mask, meta.age float64, meta.at int8, meta.ids uint16[6]")
    assert {name: said for name, said in parts.items() if name.startswith("input.part.")} == {
        "input.part.image": "uint8[2, 2, 3] float: hwc, /255",
        "input.part.mask": "mask_right[6] bool",
        "input.part.meta.age": "float64[] float",
        "input.part.meta.at": "int8[] integer",
        "input.part.meta.ids": "uint16[6] integer",
    }
    assert request_of(parts, [code.parent], (code.parent,)).packing == LAYOUT
    order = order_of("k", request, CPU)
    assert request_of_order(json.loads(json.dumps(order))).packing == LAYOUT
    bounded = replace(request, packing=LAYOUT.bounded(5))
    assert schedule_key(key_parts(bounded, CPU)) != schedule_key(parts)


def test_each_part_has_its_own_limits(code: Path) -> None:
    """A record out of range in one of them is bad, and the reason names the part."""
    request = asked(code)
    limits = find_limits(build_module(request, CPU), request.input_shape, CPU)
    given = values()
    assert limits.wrong(LAYOUT.pack(given)) == {}
    given["meta.ids"][1, 4] = 50
    given["meta.at"][2] = -1
    assert limits.wrong(LAYOUT.pack(given)) == {
        1: "meta.ids holds 50 at [4]; expected 0 to 49: the model looks it up in a table of 50 rows",
        2: "meta.at holds -1; expected 0 to 6: the model looks it up in a table of 7 rows",
    }


def test_limits_that_cannot_be_found_say_why(code: Path) -> None:
    """The model is called with random records, and may refuse them."""
    layout = Layout(
        (Part(path="ids", shape=(3,), dtype="int32"), Part(path="attention_mask", shape=(4,), dtype="int32"))
    )
    broken = asked(code, Layout((*LAYOUT.parts[:2], Part(path="meta.ids", shape=(6,), dtype="int32"))))
    limits = find_limits(build_module(broken, CPU), broken.input_shape, CPU)
    assert limits.unchecked == "the model cannot be called with random records: KeyError: 'at'"
    plain = asked(code, layout, "branches")
    assert find_limits(build_module(plain, CPU), plain.input_shape, CPU).wrong(layout.empty(2)) == {}


def test_a_branch_on_a_mask_is_refused(store: Store, code: Path) -> None:
    """The mask differs from batch to batch, so the job runs in eager and says so."""
    layout = Layout(
        (Part(path="ids", shape=(4,), dtype="int32"), Part(path="attention_mask", shape=(4,), make="mask_right"))
    )
    made = prepare(asked(code, layout, "branches"), device=CPU, store=store, residents=Residents(2**30))
    assert made.loaded.fallback is not None
    assert "no schedule could be built" in made.loaded.fallback
    rows = layout.pack({"ids": np.ones((3, 4), dtype=np.int32), "attention_mask": np.array([4, 4, 4])})
    assert outputs_of(made.loaded, torch.from_numpy(rows))["output"].tolist() == [[2.0] * 4] * 3
    rows = layout.pack({"ids": np.ones((3, 4), dtype=np.int32), "attention_mask": np.array([4, 2, 4])})
    assert outputs_of(made.loaded, torch.from_numpy(rows))["output"].tolist() == [[3.0] * 4] * 3


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        (
            ["image", "pixels"],
            "input.fields.x.pixels: no such argument; the model takes: image "
            "(required), meta (required), mask (required), scale",
        ),
        (
            ["image", "meta.ids"],
            "input.fields.x: the model cannot be called with these arguments: missing a required argument: 'mask'",
        ),
        (
            ["0", "image", "meta", "mask"],
            "input.fields.x: the model cannot be called with these arguments: multiple values for argument",
        ),
    ],
)
def test_arguments_that_the_model_does_not_take(code: Path, paths: list[str], said: str) -> None:
    """They are found when the model is built, before any call, and its own arguments are listed."""
    layout = Layout(tuple(Part(path=path, shape=(2,), dtype="int32") for path in paths))
    with pytest.raises(ModelError) as raised:
        build_module(asked(code, layout), CPU)
    assert str(raised.value).startswith(said)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("padding", ["mask_right", "mask_left"])
def test_a_mask_is_an_input_of_the_schedule(store: Store, tmp_path: Path, attention: str, padding: Any) -> None:
    """BERT with masks of several shapes agrees with texts called one by one, without a mask."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=300, max_position_embeddings=64, **sizes)
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    layout = text_layout(8, vocabulary=300, token_types=True, mask=padding)
    layout = Layout((*layout.parts, Part(path="position_ids", shape=(8,), dtype="int32", below=64)))
    model = ModelSpec(source=f"transformers:{tmp_path / 'bert'}", args={"attn_implementation": attention})
    request = Request(model=model, shape=(layout.nbytes,), dtype="uint8", batch_size=4, packing=layout)
    made = prepare(request, device=CPU, store=store, residents=Residents(2**30))
    assert made.loaded.fallback is None
    assert made.loaded.instances
    module, random = build_module(request, CPU).model, np.random.default_rng(0)
    assert module.config._attn_implementation == attention
    ids, types = random.integers(0, 300, (4, 8)), random.integers(0, 2, (4, 8))
    for lengths in ([8] * 4, [1] * 4, [3, 7, 8, 1]):
        keep = [slice(n) if padding == "mask_right" else slice(8 - n, 8) for n in lengths]
        at = np.zeros((4, 8), dtype=int)
        for row, kept in enumerate(keep):
            at[row, kept] = np.arange(lengths[row])
        given = {"input_ids": ids, "token_type_ids": types, "attention_mask": np.array(lengths), "position_ids": at}
        found = outputs_of(made.loaded, torch.from_numpy(layout.pack(given)))["last_hidden_state"]
        for row, kept in enumerate(keep):
            with torch.no_grad():
                alone = module(
                    input_ids=torch.from_numpy(ids[row : row + 1, kept]),
                    token_type_ids=torch.from_numpy(types[row : row + 1, kept]),
                )
            torch.testing.assert_close(found[row, kept], alone["last_hidden_state"][0], atol=1e-5, rtol=1e-4)
