"""Host memory that a `run` command takes while its model is loaded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from nimble_jobs.data.buffers import Buffers
from nimble_jobs.planner import Loaded, Request
from nimble_jobs.spec import ModelSpec
from nimble_jobs.workloads import early_buffers
from nimble_jobs.workloads.early_buffers import EarlyBuffers

CPU = torch.device("cpu")
MEMORY = (1 << 16, 8)  # bytes of a batch, batches


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Buffers]:
    """The memory that was taken early."""
    taken: list[Buffers] = []
    batch_buffers = early_buffers.batch_buffers

    def noted(nbytes: int, count: int, device: torch.device) -> Buffers:
        taken.append(batch_buffers(nbytes, count, device))
        return taken[-1]

    monkeypatch.setattr(early_buffers, "batch_buffers", noted)
    return taken


def loaded() -> Loaded:
    model = ModelSpec(source="torchvision:resnet18")
    request = Request(model=model, shape=(3,), dtype="float32", batch_size=2)
    return Loaded(key="k", request=request, device=CPU, module=nn.Identity())


def test_the_model_uses_what_was_taken_early(made: list[Buffers]) -> None:
    """And nothing is taken twice."""
    model = loaded()
    with EarlyBuffers(MEMORY, CPU) as early:
        early.give(model)
    assert [model.buffers(*MEMORY)] == made
    model.close()
    assert made[0].fd == -1


def test_a_model_that_has_memory_keeps_it(made: list[Buffers]) -> None:
    """What was taken early is released then."""
    model = loaded()
    own = model.buffers(*MEMORY)
    with EarlyBuffers(MEMORY, CPU) as early:
        early.give(model)
    assert model.buffers(*MEMORY) is own
    assert [buffers.fd for buffers in made] == [-1]
    model.close()


def test_memory_is_cut_anew_for_another_input() -> None:
    """Nothing is taken, and so pinned, again, as long as the memory is large enough."""
    model = loaded()
    own = model.buffers(1 << 20, 8)
    memory = own.memory
    for nbytes, count in ((1 << 18, 23), (1 << 20, 8), (1 << 12, 12)):
        found = model.buffers(nbytes, count)
        assert (found, found.memory is memory, found.nbytes, found.count) == (own, True, nbytes, count)
        found.begin()
        taken = [found.take() for _ in range(count)]
        arrays = [buffer.array for buffer in taken if buffer is not None]
        assert [array.ctypes.data - memory.ctypes.data for array in arrays] == [i * nbytes for i in range(count)]
        assert found.free == 0
    larger = model.buffers(1 << 21, 8)
    assert own.fd == -1
    assert larger.memory.nbytes == 8 << 21
    model.close()


def test_memory_that_cannot_be_had_for_a_larger_input_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next job takes new memory, and is not given what was closed."""
    model = loaded()
    model.buffers(1 << 16, 8)
    with monkeypatch.context() as patched:
        patched.setattr("nimble_jobs.planner.jobs.loaded.pin", _no_memory)
        with pytest.raises(OSError, match="no memory"):
            model.buffers(1 << 20, 8)
    assert model.buffers(1 << 12, 8).fd >= 0
    model.close()


def _no_memory(_memory: np.ndarray, _device: torch.device) -> bool:
    raise OSError("no memory")


def test_memory_that_nobody_takes_is_released(made: list[Buffers]) -> None:
    """As when the model cannot be loaded; and without a size none is taken."""
    with pytest.raises(RuntimeError, match="no model"), EarlyBuffers(MEMORY, CPU):
        raise RuntimeError("no model")
    assert [buffers.fd for buffers in made] == [-1]
    with EarlyBuffers(None, CPU) as early:
        early.give(loaded())
    assert len(made) == 1


def test_memory_that_cannot_be_had_is_left_to_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes it again, and says why that fails."""

    def refuse(_nbytes: int, _count: int, _device: torch.device) -> Buffers:
        raise OSError("no memory")

    monkeypatch.setattr(early_buffers, "batch_buffers", refuse)
    model = loaded()
    with EarlyBuffers(MEMORY, CPU) as early:
        early.give(model)
    assert model.buffers(*MEMORY).nbytes >= 1 << 16
    model.close()
