"""Whole jobs over models with several inputs, of every kind of model and format that can name them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch

from nimble_jobs import spec as specs
from nimble_jobs.job import JobState
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.foreground import run_inline
from tests.store_samples import queued

N = 11
CODE = """
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Answer:
    score: torch.Tensor
    parts: dict


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.image, self.age = nn.Embedding(50, 4), nn.Linear(12, 4), nn.Linear(1, 4)

    def forward(self, image, meta):
        flags = meta["mask"].unsqueeze(-1).to(image.dtype)
        text = (self.words(meta["ids"]) * flags).sum(1) / flags.sum(1).clamp(min=1)
        picture = self.image(image.flatten(1))
        score = (text + picture + self.age(meta["age"].unsqueeze(1))).sum(1)
        return Answer(score=score, parts={"text": text, "pair": (picture, score * 2)})


def mixed():
    return Mixed()


class Sums(nn.Module):
    def forward(self, a, b=None, *, scale):
        return a * scale.unsqueeze(1) if b is None else a * scale.unsqueeze(1) + b


def sums():
    return Sums()
"""
RANDOM = np.random.default_rng(2)
IMAGE = RANDOM.integers(0, 256, (N, 2, 2, 3)).astype(np.uint8)
IDS = RANDOM.integers(0, 50, (N, 6)).astype(np.int32)
MASK = np.arange(6) < RANDOM.integers(1, 7, (N, 1))
AGE = RANDOM.random(N)
SUMS = "python:net.py:sums"
UNFIT = "x: the model cannot be called with these arguments"
TAKES = "a (required), b, scale (required)"
MIXED = {"image": "pixels", "meta.ids": "tokens", "meta.mask": "kept", "meta.age": "age"}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home"))) as opened:
        yield opened


def job(folder: Path, source: str, x: dict[str, str], model: str, fields: list[str], **args: Any) -> dict[str, Any]:
    (folder / "net.py").write_text(CODE)
    spec: dict[str, Any] = {
        "version": 1,
        "name": "n",
        "kind": "score",
        "model": {"source": model, "seed": 3, "args": args},
        "input": {"source": source, "format": Path(source).suffix[1:], "fields": {"x": x}, "batch_size": 4},
        "output": {"path": "out", "fields": fields, "if_exists": "replace", "shard_size": 8},
        "schedule": {"progressive": False},
        "run": {"device": "cpu", "error_threshold": -1},
    }
    return specs.dump(specs.loads(json.dumps(spec), "job", folder))


def scored(store: Store, folder: Path, spec: dict[str, Any]) -> tuple[pa.Table, Any, list[dict[str, Any]]]:
    """The published columns, how the job came by its schedule, and its bad records."""
    made = queued(
        store, spec=spec, name="n", kind="score", foreground=True, allow_python=[str(folder)], now=time.time()
    )
    ended = run_inline(store, made.id)
    assert ended.state is JobState.SUCCEEDED, ended.error
    errors = folder / "out" / "errors.jsonl"
    bad = [json.loads(line) for line in errors.read_text().splitlines()] if errors.exists() else []
    return pq.read_table(sorted((folder / "out").glob("*.parquet"))), ended.schedule, bad


def npz(folder: Path) -> str:
    np.savez(folder / "d.npz", pixels=IMAGE, tokens=IDS, kept=MASK, age=AGE)
    return "d.npz"


def parquet(folder: Path) -> str:
    columns = {"pixels": IMAGE.tolist(), "tokens": IDS.tolist(), "kept": MASK.tolist(), "age": AGE}
    types = {"pixels": pa.list_(pa.list_(pa.list_(pa.uint8()))), "tokens": pa.list_(pa.int32(), 6)}
    table = pa.table({name: pa.array(values, type=types.get(name)) for name, values in columns.items()})
    pq.write_table(table, folder / "d.parquet", row_group_size=3)
    return "d.parquet"


@pytest.mark.parametrize("form", [npz, parquet])
def test_a_model_with_nested_arguments_and_a_dataclass_as_its_answer(store: Store, tmp_path: Path, form: Any) -> None:
    """Each record gets what the model says of it alone; the second run finds the schedule."""
    spec = job(tmp_path, form(tmp_path), MIXED, "python:net.py:mixed", ["id", "score", "parts.text", "parts.pair.1"])
    table, schedule, bad = scored(store, tmp_path, spec)
    assert (schedule["hit"], bad) == ("miss", [])
    assert schedule["runs"] in ("schedule", "eager")
    assert table.column_names == ["id", "score", "parts.text", "parts.pair.1"]
    module = _module(tmp_path, spec)
    for row in range(N):
        kept = int(MASK[row].sum())
        meta = {
            "ids": torch.from_numpy(IDS[row : row + 1, :kept].astype(np.int64)),
            "mask": torch.ones(1, kept, dtype=torch.bool),
            "age": torch.tensor([AGE[row]], dtype=torch.float32),
        }
        pixels = torch.from_numpy(IMAGE[row : row + 1]).permute(0, 3, 1, 2).float() / 255
        with torch.no_grad():
            alone = module(image=pixels, meta=meta)
        assert table["score"][row].as_py() == pytest.approx(alone.score.item(), rel=1e-4, abs=1e-5)
        assert table["parts.text"][row].as_py() == pytest.approx(alone.parts["text"][0].tolist(), rel=1e-4, abs=1e-5)
    again, schedule, _ = scored(store, tmp_path, spec)
    assert schedule["hit"] == "stored"
    assert again.equals(table)


def _module(folder: Path, spec: dict[str, Any]) -> torch.nn.Module:
    from nimble_jobs.models.build import build

    return build(specs.restore(spec).model, allowed_python=(folder,))


def test_a_record_out_of_range_in_one_input_is_left_out(store: Store, tmp_path: Path) -> None:
    """The reason names the argument; all others are scored."""
    tokens = IDS.copy()
    tokens[7, 2] = 50
    np.savez(tmp_path / "d.npz", pixels=IMAGE, tokens=tokens, kept=MASK, age=np.where(np.arange(N) == 4, np.nan, AGE))
    spec = job(tmp_path, "d.npz", MIXED, "python:net.py:mixed", ["id", "score"])
    table, _, bad = scored(store, tmp_path, spec)
    assert table["id"].to_pylist() == [str(i) for i in range(N) if i not in (4, 7)]
    assert {one["id"]: one["reason"].removeprefix(f"{tmp_path}/d.npz: ") for one in bad} == {
        "4": "record 4: meta.age: 1 of 1 values are NaN or infinite; expected finite numbers",
        "7": "record 7: meta.ids holds 50 at [2]; expected 0 to 49: the model looks it up in a table of 50 rows",
    }


@pytest.mark.parametrize("named", [True, False])
def test_an_exported_program_with_keyword_arguments(store: Store, tmp_path: Path, *, named: bool) -> None:
    """Nested as it was exported, in tuples too; a positional argument may be named by its place or its name."""

    class Program(torch.nn.Module):
        def forward(self, a: Any, meta: Any, *, mask: Any) -> Any:
            return {"made": a * meta["pair"][0].unsqueeze(1) + meta["pair"][1].unsqueeze(1), "flags": mask * 2}

    meta = {"pair": (torch.ones(4), torch.ones(4))}
    example = {"mask": torch.ones(4, 2, dtype=torch.int32)}
    torch.export.save(torch.export.export(Program(), (torch.ones(4, 3), meta), example), tmp_path / "net.pt2")
    columns = {f"a{i}": RANDOM.random(N) for i in range(3)} | {"p": AGE, "q": AGE * 2}
    columns |= {f"m{i}": RANDOM.integers(0, 2, N) for i in range(2)}
    pa.csv.write_csv(pa.table(columns), tmp_path / "d.csv")
    one, two = ("a", "meta") if named else ("0", "1")
    x = {one: "a*", f"{two}.pair.0": "p", f"{two}.pair.1": "q", "mask": "m0,m1"}
    table, _, bad = scored(store, tmp_path, job(tmp_path, "d.csv", x, "exported:net.pt2", ["id", "made", "flags"]))
    assert bad == []
    a = np.stack([columns[f"a{i}"] for i in range(3)], axis=1)
    np.testing.assert_allclose(np.array(table["made"].to_pylist()), a * AGE[:, None] + 2 * AGE[:, None], rtol=1e-5)
    flags = np.stack([columns["m0"], columns["m1"]], axis=1) * 2
    np.testing.assert_array_equal(np.array(table["flags"].to_pylist()), flags)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_transformers_model_with_a_column_for_its_mask(store: Store, tmp_path: Path, attention: str) -> None:
    """Any argument of its forward may be a column; the mask differs from record to record."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=50, max_position_embeddings=16, **sizes)
    torch.manual_seed(0)
    model = transformers.BertModel(config).eval()
    model.save_pretrained(tmp_path / "bert")
    spec = job(
        tmp_path,
        parquet(tmp_path),
        {"input_ids": "tokens", "attention_mask": "kept"},
        "transformers:bert",
        ["id", "pooler_output"],
        attn_implementation=attention,
    )
    table, schedule, bad = scored(store, tmp_path, spec)
    assert (schedule["fallback"], bad) == (None, [])
    for row in range(N):
        ids = torch.from_numpy(IDS[row : row + 1, : MASK[row].sum()].astype(np.int64))
        with torch.no_grad():
            alone = model(input_ids=ids).pooler_output[0]
        torch.testing.assert_close(torch.tensor(table["pooler_output"][row].as_py()), alone, atol=1e-5, rtol=1e-4)


def test_a_misspelt_mask_is_refused(store: Store, tmp_path: Path) -> None:
    """transformers' models ignore arguments that they do not know."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    transformers.BertModel(transformers.BertConfig(vocab_size=50, **sizes)).save_pretrained(tmp_path / "bert")
    x = {"input_ids": "tokens", "attention_msk": "kept"}
    error = failed(store, tmp_path, job(tmp_path, npz(tmp_path), x, "transformers:bert", ["id", "pooler_output"]))
    assert "input.fields.x.attention_msk: no such argument; the model takes: input_ids, attention_mask," in error


def failed(store: Store, folder: Path, spec: dict[str, Any]) -> str:
    made = queued(
        store, spec=spec, name="n", kind="score", foreground=True, allow_python=[str(folder)], now=time.time()
    )
    ended = run_inline(store, made.id)
    assert ended.state is JobState.FAILED
    assert ended.error is not None
    return ended.error


@pytest.mark.parametrize(
    ("model", "x", "said"),
    [
        (SUMS, {"a": "pixels", "scal": "age"}, f"x.scal: no such argument; the model takes: {TAKES}"),
        (
            SUMS,
            {"a": "pixels"},
            f"{UNFIT}: missing a required argument: 'scale'; it takes: {TAKES}",
        ),
        (
            SUMS,
            {"0": "pixels", "1": "age", "2": "age", "scale": "age"},
            f"{UNFIT}: too many positional arguments; it takes: {TAKES}",
        ),
        (
            "exported:net.pt2",
            {"a": "age", "scale.x": "age"},
            "x: lacks scale; the program was exported with: a, scale",
        ),
    ],
)
def test_arguments_that_do_not_fit_the_model(
    store: Store, tmp_path: Path, model: str, x: dict[str, str], said: str
) -> None:
    """The job fails before its first batch, and lists what the model takes."""

    class Program(torch.nn.Module):
        def forward(self, a: Any, scale: Any) -> Any:
            return a * scale

    torch.export.save(torch.export.export(Program(), (torch.ones(4), torch.ones(4))), tmp_path / "net.pt2")
    assert f"input.fields.{said}" in failed(store, tmp_path, job(tmp_path, npz(tmp_path), x, model, ["id", "output"]))
