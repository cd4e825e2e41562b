"""Schedules that take records as they are stored: built, stored, checked, replayed and carried like any other."""

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

from nimble_jobs import spec as specs
from nimble_jobs.data.transform import bind
from nimble_jobs.engine import device as devices
from nimble_jobs.job import Hit, JobState
from nimble_jobs.planner import Request, prepare, schedule_key
from nimble_jobs.planner.jobs.background import order_of, request_of_order
from nimble_jobs.planner.jobs.loaded import build_module
from nimble_jobs.planner.jobs.replay import replay, request_of
from nimble_jobs.planner.keys.request import key_parts
from nimble_jobs.planner.lookup.transfer import import_schedules
from nimble_jobs.planner.lookup.why import why
from nimble_jobs.planner.module.limits import find_limits, numbers_for
from nimble_jobs.preprocess import bits
from nimble_jobs.spec import ModelSpec
from nimble_jobs.spec.transform import TransformSpec
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.bundle import write_bundle
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.foreground import run_inline
from nimble_jobs.worker.residency import Residents
from tests.one_batch import outputs_of
from tests.store_samples import queued

CPU = torch.device("cpu")
CODE = """
import torch
from torch import nn

def images():
    layers = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(4, 2))

def tokens():
    return nn.Sequential(nn.Embedding(300, 4), nn.Flatten(), nn.Linear(12, 2))
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home"))) as opened:
        yield opened


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(CODE)
    return path


def asked(code: Path, shape: tuple[int, ...], dtype: str, factory: str = "images", **transform: Any) -> Request:
    """The request of a job over arrays of this type, on a device of its own memory."""
    bound = bind(TransformSpec(**transform), shape, np.dtype(dtype), "x.npy")
    assert bound.preprocess is not None
    return Request(
        model=ModelSpec(source=f"python:{code}:{factory}"),
        shape=bound.signature.shape,
        dtype=bound.signature.dtype,
        batch_size=2,
        preprocess=bound.preprocess,
        allowed_python=(code.parent,),
    )


@pytest.mark.parametrize(
    ("shape", "dtype", "transform"),
    [
        ((8, 8, 3), "uint8", {"mean": (0.5,), "std": (0.25,)}),
        ((3, 8, 8), "float32", {}),
        ((9, 10, 3), "uint16", {"resize": (8, 8), "scale": 1 / 65535}),
    ],
)
def test_a_schedule_takes_stored_records(
    store: Store, code: Path, tmp_path: Path, shape: tuple[int, ...], dtype: str, transform: dict[str, Any]
) -> None:
    """Built, loaded again, replayed from what is stored alone, and carried elsewhere; results are eager's."""
    request = asked(code, shape, dtype, **transform)
    built = prepare(request, device=CPU, store=store, residents=Residents(2**30))
    loaded = prepare(request, device=CPU, store=store, residents=Residents(2**30))
    assert [built.hit, loaded.hit] == [Hit.MISS, Hit.STORED]
    schedule = loaded.loaded.schedule
    assert schedule is not None
    (port,) = schedule.program.inputs
    assert port.view.shape == (2, *shape)
    # the normalisation, below the module around the model
    assert any("folded" in c.name and c.error is not None for c in schedule.candidates)
    stored = np.random.default_rng(0).integers(0, 256, size=(2, *shape)).astype(dtype)
    x = torch.from_numpy(bits(stored))
    with torch.no_grad():
        wanted = build_module(request, CPU)(x)
    for prepared in (built, loaded):
        assert all(instance.inputs["x"].is_contiguous() for instance in prepared.loaded.instances)
        torch.testing.assert_close(outputs_of(prepared.loaded, x)["output"], wanted)
    (entry,) = store.schedules.list()
    found_again = replay(entry, device=CPU, store=store, folders=[code.parent], allowed_python=(code.parent,))
    assert found_again.agrees, found_again.said
    write_bundle(store, [entry.key], tmp_path / "b.zip", time.time())
    with open_store(resolve(str(tmp_path / "there"))) as there:
        (taken,) = import_schedules(tmp_path / "b.zip", store=there, now=time.time(), agreed=lambda _: True).schedules
        assert taken.taken
        assert prepare(request, device=CPU, store=there, residents=Residents(2**30)).hit is Hit.STORED


def test_an_exported_program_takes_stored_records(store: Store, code: Path) -> None:
    """Though its input was fixed when it was exported."""
    request = asked(code, (8, 8, 3), "uint8")
    plain = build_module(replace(request, preprocess=None), CPU)
    file = code.with_suffix(".pt2")
    torch.export.save(torch.export.export(plain, (torch.zeros(2, 3, 8, 8),)), file)
    exported = replace(request, model=ModelSpec(source=f"exported:{file}"))
    made = prepare(exported, device=CPU, store=store, residents=Residents(2**30))
    assert made.loaded.fallback is None
    x = torch.randint(0, 256, (2, 8, 8, 3), dtype=torch.uint8)
    with torch.no_grad():
        wanted = plain(x.permute(0, 3, 1, 2) / 255)
    torch.testing.assert_close(outputs_of(made.loaded, x)["output"], wanted)


def test_features_of_stored_records(store: Store, code: Path) -> None:
    """The features under the last layer come along."""
    request = replace(asked(code, (8, 8, 3), "uint8"), embedding=True)
    made = prepare(request, device=CPU, store=store, residents=Residents(2**30))
    found = outputs_of(made.loaded, torch.randint(0, 256, (2, 8, 8, 3), dtype=torch.uint8))
    assert {name: tuple(t.shape) for name, t in found.items()} == {"output": (2, 2), "embedding": (2, 4)}


def test_the_key_names_each_step(code: Path) -> None:
    """Each step has its say in the key; what the model's own parts say is the same with and without any."""
    base = asked(code, (8, 8, 3), "uint8", mean=(0.5,))
    parts = key_parts(base, CPU)
    assert parts["input"] == "x:uint8[2, 8, 8, 3]"
    assert parts["input.preprocess"] == "hwc, /255, mean 0.5"
    plain = key_parts(replace(base, preprocess=None), CPU)
    assert plain["input"] == "x:float32[2, 3, 8, 8]"
    assert {n for n in parts if parts[n] != plain.get(n)} == {"input", "input.preprocess"}
    others = [
        asked(code, (8, 8, 3), "uint8", **transform)
        for transform in ({}, {"mean": (0.25,)}, {"mean": (0.5,), "std": (0.5,)}, {"mean": (0.5,), "scale": 1.0})
    ] + [asked(code, (3, 8, 8), "uint8", mean=(0.5,)), asked(code, (8, 8, 3), "float32", mean=(0.5,))]
    assert len({schedule_key(key_parts(r, CPU)) for r in (base, *others)}) == len(others) + 1


@pytest.mark.parametrize("shape", [(8, 8, 3), (3, 8, 8)])
def test_a_request_survives_its_key_and_its_order(code: Path, shape: tuple[int, ...]) -> None:
    """Another process, and `cache verify --replay`, ask for the same."""
    request = asked(code, shape, "uint8", resize=(6, 7), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    again = request_of(key_parts(request, CPU), [code.parent], (code.parent,))
    assert (again.preprocess, again.shape, again.dtype) == (request.preprocess, request.shape, request.dtype)
    assert key_parts(again, CPU) == key_parts(request, CPU)
    ordered = request_of_order(json.loads(json.dumps(order_of("k", request, CPU))))
    at_once = request.schedule.model_copy(update={"progressive": False})
    assert ordered == replace(request, schedule=at_once)


def test_a_key_with_unknown_steps_is_not_replayed(code: Path) -> None:
    """It was written by another version, and says so."""
    parts = key_parts(asked(code, (8, 8, 3), "uint8"), CPU) | {"input.preprocess": "hwc, sharpen"}
    with pytest.raises(ValueError, match="no step of a preprocessing: 'sharpen'"):
        request_of(parts, [code.parent], (code.parent,))


def test_why_names_the_step_that_differs(store: Store, code: Path) -> None:
    """In the words of the key."""
    prepare(asked(code, (8, 8, 3), "uint8", mean=(0.5,)), device=CPU, store=store, residents=Residents(2**30))
    found = why(asked(code, (8, 8, 3), "uint8", mean=(0.25,)), device=CPU, store=store)
    (difference,) = found.differences
    assert (difference.part, difference.wanted) == ("input.preprocess", "hwc, /255, mean 0.25")
    assert difference.stored == "hwc, /255, mean 0.5"


@pytest.mark.parametrize(("dtype", "most"), [("uint8", 256), ("int16", 300), ("uint16", 300), ("int64", 300)])
def test_whole_numbers_are_bounded_as_they_are_stored(code: Path, dtype: str, most: int) -> None:
    """The model's table bounds them, and so does their type; random ones stay below both."""
    request = asked(code, (3,), dtype, "tokens")
    assert request.all_integers
    module = build_module(request, CPU)
    assert numbers_for(module) == most
    limits = find_limits(module, request.input_shape, CPU)
    stored = np.array([[0, 1, 2], [3, 4, min(299, np.iinfo(dtype).max)]]).astype(dtype)
    assert limits.wrong(stored) == {}
    with torch.no_grad():
        module(torch.from_numpy(bits(stored)))
    if dtype != "uint8":
        stored[1, 2] = 300
        assert list(limits.wrong(stored)) == [1]


def job(folder: Path, **given: Any) -> dict[str, Any]:
    (folder / "net.py").write_text(CODE)
    spec = {
        "version": 1,
        "name": "n",
        "kind": "score",
        "model": {"source": f"python:{folder}/net.py:{given.pop('factory', 'images')}"},
        "input": {"source": str(folder / "x.npy"), "format": "npy", "batch_size": 4, **given},
        "schedule": {"progressive": False},
        "output": {"path": str(folder / "out"), "fields": ["id", "logits"], "format": "npy", "if_exists": "replace"},
        "run": {"error_threshold": -1.0},
    }
    return specs.dump(specs.restore(spec))


def scored(folder: Path, spec: dict[str, Any], store: Store) -> tuple[np.ndarray, str]:
    """The logits that a job gives, and what it says of bad records."""
    made = queued(
        store, spec=spec, name="n", kind="score", foreground=True, allow_python=[str(folder)], now=time.time()
    )
    ended = run_inline(store, made.id)
    assert ended.state is JobState.SUCCEEDED, ended.error
    errors = folder / "out" / "errors.jsonl"
    files = sorted((folder / "out").glob("*logits*.npy"))
    return np.concatenate([np.load(f) for f in files]), errors.read_text() if errors.exists() else ""


@pytest.mark.parametrize(
    ("array", "given"),
    [
        (np.random.default_rng(0).integers(0, 256, (10, 8, 8, 3), dtype=np.uint8), {"transform": {"mean": [0.5]}}),
        (np.random.default_rng(0).normal(size=(10, 3, 8, 8)).astype(np.float16), {}),
        (np.random.default_rng(0).integers(0, 310, (10, 3)).astype(np.uint16), {"factory": "tokens"}),
    ],
    ids=["bytes", "halves", "tokens"],
)
def test_a_job_gives_the_same_either_way(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, array: np.ndarray, given: dict[str, Any]
) -> None:
    """With the arithmetic on the host, and in the schedule: the same results, and the same bad records."""
    if array.dtype == np.float16:
        array[3, 0, 0, 0] = np.nan
    np.save(tmp_path / "x.npy", array)
    spec = job(tmp_path, **given)
    host = scored(tmp_path, spec, store)
    monkeypatch.setattr(devices, "separate_memory", lambda _: True)
    device = scored(tmp_path, spec, store)
    assert device[1] == host[1]
    assert bool(host[1]) == (array.dtype != np.uint8)
    np.testing.assert_allclose(device[0], host[0], rtol=1e-5, atol=1e-6)
    assert len({entry.key for entry in store.schedules.list()}) == 2
