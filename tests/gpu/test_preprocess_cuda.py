"""Records that cross as they are stored, on a real GPU: the host's numbers, in one more kernel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nimble_jobs import planner
from nimble_jobs.data.transform import bind, on_host
from nimble_jobs.engine.difference import relative_norm
from nimble_jobs.engine.verify import TOLERANCE
from nimble_jobs.job import Hit
from nimble_jobs.models.preprocessed import Preprocessed
from nimble_jobs.planner import Request
from nimble_jobs.planner.jobs.loaded import build_module
from nimble_jobs.planner.sources.source import Layout, Source, Variants, record_source
from nimble_jobs.preprocess import FLOATS, Preprocess, bits
from nimble_jobs.spec import ModelSpec, ScheduleSpec
from nimble_jobs.spec.transform import TransformSpec
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.residency import Residents
from tests.one_batch import outputs_of

IMAGENET: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
FP32 = float(np.finfo(np.float32).eps)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home"))) as opened:
        yield opened


def steps_of(shape: tuple[int, ...], dtype: str, **transform: Any) -> Preprocess:
    found = bind(TransformSpec(**transform), shape, np.dtype(dtype), "x.npy").preprocess
    assert found is not None
    return found


def batch_of(steps: Preprocess, rows: int) -> np.ndarray:
    made = np.random.default_rng(0)
    if steps.dtype in FLOATS:
        return (made.normal(size=(rows, *steps.shape)) * 50).astype(steps.dtype)
    return made.integers(0, 256 if steps.dtype != "bool" else 2, size=(rows, *steps.shape)).astype(steps.dtype)


@pytest.mark.parametrize("layout", ["hwc", "chw"])
@pytest.mark.parametrize(
    "dtype",
    ["bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "float16", "float32", "float64"],
)
def test_eager_rounds_as_the_host_does(device: torch.device, dtype: str, layout: str) -> None:
    """Every stored type and layout: equal bits in fp32."""
    shape = (17, 19, 3) if layout == "hwc" else (3, 17, 19)
    steps = steps_of(shape, dtype, layout=layout, scale=1 / 255, center_crop=(12, 11), **IMAGENET)
    stored = batch_of(steps, 5)
    found = Preprocessed(nn.Identity(), steps, torch.float32, device)(torch.from_numpy(bits(stored)).to(device))
    assert np.array_equal(found.cpu().numpy(), on_host(steps, stored))


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("size", [(224, 224), (700, 40), (8, 6)])
def test_a_resize_is_the_hosts_but_for_rounding(device: torch.device, size: tuple[int, int], tf32: bool) -> None:
    """In plain fp32 whatever the process's switches say: as many roundings of the largest value as rows and columns."""
    steps = steps_of((500, 375, 3), "uint8", resize=size)
    stored = batch_of(steps, 3)
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"
    try:
        found = Preprocessed(nn.Identity(), steps, torch.float32, device)(torch.from_numpy(stored).to(device))
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert np.abs(found.cpu().numpy() - on_host(steps, stored)).max() <= (500 + 375) * FP32


def request(shape: tuple[int, ...], dtype: str, kind: str, **transform: Any) -> Request:
    bound = bind(TransformSpec(**transform), shape, np.dtype(dtype), "x.npy")
    return Request(
        model=ModelSpec(source="torchvision:resnet18", dtype=kind),  # type: ignore[arg-type]
        shape=bound.signature.shape,
        dtype=bound.signature.dtype,
        batch_size=8,
        preprocess=bound.preprocess,
        schedule=ScheduleSpec(in_flight=1, streams=1),
    )


@pytest.mark.parametrize("kind", ["fp16", "fp32"])
@pytest.mark.parametrize("shape", [(224, 224, 3), (3, 224, 224)], ids=["NHWC", "NCHW"])
def test_a_network_gives_what_it_gives_with_the_hosts_arithmetic(
    store: Store, device: torch.device, shape: tuple[int, ...], kind: str
) -> None:
    """Built and loaded again, over stored bytes; the input lies as the records do, whatever the weights' layout."""
    wanted = request(shape, "uint8", kind, **IMAGENET)
    assert wanted.preprocess is not None
    stored = batch_of(wanted.preprocess, 8)
    ready = torch.from_numpy(on_host(wanted.preprocess, stored)).to(device, wanted.model_dtype)
    for hit in (Hit.MISS, Hit.STORED):
        prepared = planner.prepare(wanted, device=device, store=store, residents=Residents(2**34))
        assert (prepared.hit, prepared.loaded.fallback) == (hit, None)
        assert prepared.loaded.instances
        port = prepared.loaded.instances[0].inputs["x"]
        assert (port.dtype, tuple(port.shape), port.is_contiguous()) == (torch.uint8, (8, *shape), True)
        found = outputs_of(prepared.loaded, torch.from_numpy(stored))["output"]
        model = prepared.loaded.module
        assert isinstance(model, Preprocessed)
        with torch.no_grad():
            expected = model.model(ready).cpu()
        assert relative_norm(found, expected) < TOLERANCE[kind]
        prepared.loaded.close()


@pytest.mark.parametrize("shape", [(224, 224, 3), (3, 224, 224)], ids=["NHWC", "NCHW"])
@pytest.mark.parametrize("layout", ["given", "channels-last"])
def test_the_arithmetic_is_one_kernel_at_most(device: torch.device, shape: tuple[int, ...], layout: Layout) -> None:
    """With Inductor's kernels a program over stored bytes has at most one task more than one over ready images."""
    wanted = request(shape, "uint8", "fp16", **IMAGENET)
    assert wanted.preprocess is not None
    source = Source(kernels="inductor", layout=layout)
    module = build_module(wanted, device)
    assert isinstance(module, Preprocessed)
    counts = []
    for whole, x in (
        (module.model, torch.zeros(8, 3, 224, 224, device=device, dtype=torch.float16)),
        (module, torch.zeros(8, *shape, device=device, dtype=torch.uint8)),
    ):
        recorded = record_source(Variants(whole).use(source), source, {"x": x}, device)
        counts.append([task.op for task in recorded.program.tasks])
    plain, stored = counts
    assert len(stored) <= len(plain) + 1, (plain[:4], stored[:4])


def test_stored_halves_stay_where_they_lie(store: Store, device: torch.device) -> None:
    """Floating records need no change of layout on the host, though the weights be channels-last."""
    wanted = request((3, 64, 64), "float16", "fp16")
    prepared = planner.prepare(wanted, device=device, store=store, residents=Residents(2**34))
    assert prepared.loaded.instances
    assert all(instance.inputs["x"].is_contiguous() for instance in prepared.loaded.instances)
    assert wanted.preprocess is not None
    stored = batch_of(wanted.preprocess, 8) / 50
    found = outputs_of(prepared.loaded, torch.from_numpy(stored))["output"]
    with torch.no_grad():
        expected = prepared.loaded.module(torch.from_numpy(stored).to(device)).cpu()
    assert relative_norm(found, expected) < TOLERANCE["fp16"]
    prepared.loaded.close()
