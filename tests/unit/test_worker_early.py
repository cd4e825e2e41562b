"""What a `run` command begins before its job is queued, and how it leaves."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nimble_jobs.cli import main as cli
from nimble_jobs.spec import JobSpec, loads
from nimble_jobs.worker import early
from nimble_jobs.worker.early import Early
from tests.conftest import FREEZE_COUNT
from tests.waiting import PATIENCE_S

SPEC = """\
version: 1
name: early
kind: score
model: {source: "torchvision:resnet18"}
input: {source: x.npy, format: npy}
output: {path: out, format: npy, fields: [top1]}
run: {device: DEVICE}
"""


def spec(device: str) -> JobSpec:
    """A job for this device; its files need not exist."""
    return loads(SPEC.replace("DEVICE", device), "s.yaml", Path("/nowhere"), check_files=False)


class Driver:
    """A CUDA driver that answers with these results, and notes which device it was asked for."""

    def __init__(self, *, init: int = 0, retain: int = 0) -> None:
        self.asked: list[int] = []
        self._init, self._retain = init, retain

    def cuInit(self, _flags: int) -> int:  # noqa: N802
        assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"  # it is read now
        return self._init

    def cuDeviceGet(self, _device: Any, index: int) -> int:  # noqa: N802
        self.asked.append(index)
        return 0

    def cuDevicePrimaryCtxRetain(self, _context: Any, _device: Any) -> int:  # noqa: N802
        return self._retain


LOADED = "nimble_jobs.engine.first_calls.load_operators"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is set for CUDA here ends with the test."""
    for name in ("CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_a_context_is_made_on_the_device_of_the_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda:1 is the second one; then the GPU's libraries and the job's kernels are loaded, on the same device."""
    driver, loaded = Driver(), list[object]()
    monkeypatch.setattr(early, "_driver", lambda: driver)
    monkeypatch.setattr(LOADED, lambda *given, pictures: loaded.extend([*given, pictures]))
    monkeypatch.setattr("nimble_jobs.workloads.heads.load_kernels", lambda _spec, device: loaded.append(device))
    Early(spec("cuda:1")).close()
    assert (driver.asked, loaded) == ([1], [torch.device("cuda:1"), torch.float32, True, torch.device("cuda:1")])


def test_a_job_of_texts_loads_what_its_checks_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their outputs are large, so replays are compared with eager on the GPU."""
    loaded: list[torch.device] = []
    monkeypatch.setattr(early, "_driver", Driver)
    monkeypatch.setattr(LOADED, lambda *_, **__: None)
    monkeypatch.setattr("nimble_jobs.workloads.heads.load_kernels", lambda *_: None)
    monkeypatch.setattr("nimble_jobs.engine.first_calls.load_comparison", loaded.append)
    given = spec("cuda:1")
    Early(given).close()
    assert not loaded
    for format_ in ("text", "openai-batch"):
        Early(given.model_copy(update={"input": given.input.model_copy(update={"format": format_})})).close()
    assert loaded == [torch.device("cuda:1")] * 2


def test_a_job_of_the_cpu_starts_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its driver is not even looked for."""
    monkeypatch.setattr(early, "_make_context", lambda _index: pytest.fail("a GPU was started"))
    Early(spec("cpu")).close()


@pytest.mark.parametrize("driver", [None, Driver(init=100), Driver(retain=2)])
def test_without_a_gpu_nothing_happens(monkeypatch: pytest.MonkeyPatch, driver: Driver | None) -> None:
    """No driver, no device, no memory: the job will say what is missing."""

    def find() -> Driver:
        if driver is None:
            raise OSError("no such library")
        return driver

    monkeypatch.setattr(early, "_driver", find)
    monkeypatch.setattr(LOADED, lambda *_, **__: pytest.fail("there is no GPU"))
    Early(spec("auto")).close()


def test_a_gpu_that_starts_slowly_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the job is over."""
    started, over = threading.Event(), threading.Event()
    monkeypatch.setattr(early, "_driver", Driver)
    monkeypatch.setattr(
        LOADED,
        lambda *_, **__: over.set() if started.wait(PATIENCE_S) else None,
    )
    begun = Early(spec("auto"))
    begun.join()
    assert not over.is_set()
    started.set()
    begun.close()
    assert over.is_set()


def test_what_cannot_be_imported_is_left_to_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both threads end, and nobody waits for the imports for ever."""

    def refuse(name: str) -> None:
        raise ImportError(f"{name} is broken")

    monkeypatch.setattr(early, "_driver", Driver)
    monkeypatch.setattr(LOADED, lambda *_, **__: None)
    monkeypatch.setattr(importlib, "import_module", refuse)
    Early(spec("auto")).close()


@pytest.mark.parametrize(("source", "folder"), [("transformers:net", "net"), ("python:net.py:net", None)])
def test_a_library_of_models_is_imported_early(
    monkeypatch: pytest.MonkeyPatch, source: str, folder: str | None
) -> None:
    """While the collector rests, and only the one that the model needs."""
    imported: list[str] = []
    monkeypatch.setattr(
        "nimble_jobs.models.transformers_import.import_transformers", lambda path: imported.append(path.name)
    )
    given = spec("cpu")
    Early(given.model_copy(update={"model": given.model.model_copy(update={"source": source})})).close()
    assert imported == ([folder] if folder else [])


@pytest.fixture
def nothing_rests(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No object is out of the collector's sight, as in a new process; afterwards all are that were."""
    monkeypatch.setattr(gc, "get_freeze_count", FREEZE_COUNT)
    rested = gc.get_freeze_count() > 0
    gc.unfreeze()
    yield
    if rested:
        gc.freeze()


@pytest.mark.usefixtures("nothing_rests")
def test_the_collector_rests_until_all_is_imported() -> None:
    """Not longer, and in the end nothing stays out of its sight."""
    early = Early(spec("cpu"))
    assert not gc.isenabled()
    early.join()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
    early.close()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("nothing_rests")
def test_what_was_out_of_the_collectors_sight_stays_there() -> None:
    """And nothing else: others may have frozen what they hold, as a process does from which others are forked."""
    kept = [[]]
    gc.freeze()
    before = gc.get_freeze_count()
    later: list[object] = [[]]
    early = Early(spec("cpu"))
    early.join()
    assert gc.isenabled()
    assert any(seen is later for seen in gc.get_objects())
    early.close()
    assert gc.isenabled()
    assert not any(seen is kept for seen in gc.get_objects())
    assert 0 < gc.get_freeze_count() <= before


def test_a_process_with_torch_leaves_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait for torch's threads; its output is flushed, also where that fails."""
    left: list[int] = []

    class Closed:
        def flush(self) -> None:
            left.append(-1)
            raise BrokenPipeError

    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(sys, "stdout", Closed())
    monkeypatch.setitem(sys.modules, "torch", sys)
    cli.leave(100)
    assert left == [-1, 100]
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(SystemExit, match="7"):
        cli.leave(7)
