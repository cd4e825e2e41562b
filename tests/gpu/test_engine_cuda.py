"""The engine on a real GPU: capture, replay, checks, and what cannot be captured."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest
import torch
import torchvision
from torch import nn

from nimble_jobs import graph
from nimble_jobs.engine import measure
from nimble_jobs.engine.capture import Instance, capture
from nimble_jobs.engine.captures import UNCAPTURED, capturing
from nimble_jobs.engine.record import Recording, record, state_of
from nimble_jobs.engine.verify import check, poison, random_inputs, run_once
from nimble_jobs.errors import CannotRecord, CheckFailed, EngineError


def made(module: nn.Module, x: torch.Tensor) -> tuple[Recording, Instance]:
    recording = record(module, {"x": x}, state_of(module), x.device, module)
    plan, _ = graph.single_stream(recording.program)
    return recording, capture(
        recording.program, plan, state=state_of(module), constants=recording.constants, device=x.device
    )


def model(name: str, device: torch.device, dtype: torch.dtype = torch.float16) -> nn.Module:
    torch.manual_seed(0)
    extra = {"init_weights": False} if name in ("inception_v3", "googlenet") else {}
    return torchvision.models.get_model(name, weights=None, **extra).eval().to(device, dtype)


@pytest.mark.parametrize(
    ("name", "size"), [("resnet50", 224), ("mobilenet_v2", 224), ("inception_v3", 299), ("vit_b_16", 224)]
)
def test_a_graph_agrees_with_eager_on_twenty_inputs(name: str, size: int, device: torch.device) -> None:
    """Captured replays agree with eager on fresh random input, over poisoned outputs."""
    module = model(name, device)
    recording, instance = made(module, torch.zeros(1, 3, size, size, device=device, dtype=torch.float16))
    worst = max(
        check(instance, module, recording.program.inputs, device, tolerance=1e-2, seed=seed) for seed in range(10)
    )
    assert worst <= 1e-2
    assert instance.bytes > 0


def test_replays_are_repeatable_and_two_models_do_not_disturb_each_other(device: torch.device) -> None:
    """Five hundred interleaved replays of two graphs hash the same."""
    pairs = []
    for name in ("resnet18", "mobilenet_v2"):
        module = model(name, device)
        recording, instance = made(module, torch.zeros(2, 3, 96, 96, device=device, dtype=torch.float16))
        inputs = random_inputs(recording.program.inputs, device, seed=3)
        pairs.append((instance, inputs))
    seen: list[set[str]] = [set(), set()]
    for turn in range(500):
        instance, inputs = pairs[turn % 2]
        out = run_once(instance, inputs)["output"].cpu()
        seen[turn % 2].add(hashlib.sha256(out.numpy().tobytes()).hexdigest())
    assert [len(s) for s in seen] == [1, 1]


def test_closing_one_graph_leaves_the_others_right(device: torch.device) -> None:
    """Graphs that stay give the same results after others were closed and captured again."""
    kept_module = model("resnet18", device)
    recording, kept = made(kept_module, torch.zeros(1, 3, 64, 64, device=device, dtype=torch.float16))
    other = model("mobilenet_v2", device)
    for seed in range(20):
        _, instance = made(other, torch.zeros(1, 3, 64, 64, device=device, dtype=torch.float16))
        instance.replay()
        instance.close()
        check(kept, kept_module, recording.program.inputs, device, tolerance=1e-2, seed=seed)


def test_poison_reaches_the_check(device: torch.device) -> None:
    """An instance whose replay writes nothing fails the check: its poisoned outputs give it away."""
    module = nn.Linear(8, 8).to(device)
    recording, instance = made(module, torch.zeros(4, 8, device=device))
    poison(instance)
    assert bool(torch.isnan(instance.outputs["output"]).all())
    instance.replay = lambda: None  # type: ignore[method-assign]
    with pytest.raises(CheckFailed):
        check(instance, module, recording.program.inputs, device, tolerance=1e-3, seed=1)


class HostConstants(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        return x @ table.to(x.device) * torch.tensor(2.0) + torch.tensor([1.0, 1.0], device=x.device)


def test_host_constants_are_kept_on_the_device(device: torch.device) -> None:
    """Literal tensors are copied once, when recording, and not at each replay."""
    module = HostConstants()
    recording, instance = made(module, torch.zeros(3, 2, device=device))
    check(instance, module, recording.program.inputs, device, tolerance=1e-6, seed=1)


class ReadsHost(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(x.sum().cpu())


class MovesToHost(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.cpu() + 1).to(x.device)


@pytest.mark.parametrize("module", [ReadsHost(), MovesToHost()])
def test_moves_to_the_host_are_refused(module: nn.Module, device: torch.device) -> None:
    """Copies to the host are named with operator and line, and the process can go on."""
    with pytest.raises(CannotRecord, match=r"test_engine_cuda.py:\d+"):
        made(module, torch.ones(3, device=device))
    made(nn.Linear(2, 2).to(device), torch.zeros(1, 2, device=device))[1].replay()


class SynchronizesInside(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[x > 0.5] = 0.0
        return x


def test_a_capture_that_fails_leaves_no_trace(device: torch.device) -> None:
    """What the recorder accepts but CUDA cannot capture is an EngineError; the next capture works."""
    module = SynchronizesInside()
    try:
        recording, instance = made(module, torch.rand(64, device=device))
        check(instance, module, recording.program.inputs, device, tolerance=1e-6, seed=1)
    except EngineError:
        pass
    linear = nn.Linear(4, 4).to(device)
    recording, instance = made(linear, torch.zeros(2, 4, device=device))
    check(instance, linear, recording.program.inputs, device, tolerance=1e-3, seed=1)


def test_a_failed_capture_leaves_random_numbers_alone(device: torch.device) -> None:
    """What cannot be captured is refused, and the process draws the same numbers as without it."""
    x = torch.ones(4, device=device)
    torch.manual_seed(3)
    expected = torch.randn(4, device=device)
    torch.manual_seed(3)
    for _ in range(2):
        with pytest.raises(EngineError, match="cannot be captured"):
            measure.kernel_times_us([lambda: x.sum().item()], device)
    assert torch.equal(torch.randn(4, device=device), expected)


def test_memory_is_freed_as_before_after_a_failed_capture(device: torch.device) -> None:
    """Also memory that two streams have used, and a pool of its own; and the same stream is the current one."""
    before = torch.cuda.current_stream(device)
    with pytest.raises(EngineError, match="cannot be captured"):
        measure.kernel_times_us([lambda: torch.ones(4, device=device).sum().item()], device)
    graph, with_another = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    with pytest.raises(UNCAPTURED), capturing(graph, with_another):
        torch.ones(4, device=device).sum().item()
    assert torch.cuda.current_stream(device) == before

    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved(device)
    tensor = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    with torch.cuda.stream(with_another):
        tensor.add_(1)
    tensor.record_stream(with_another)
    del tensor
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool, device):
        tensor = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    del tensor, pool  # it aborts the process if torch takes a capture to be under way
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(device) == reserved


def test_errors_of_any_kind_end_a_capture(device: torch.device) -> None:
    """Also one that is none of torch's."""
    calls = []

    def fails_at_the_second_call() -> None:
        calls.append(1)
        if len(calls) > 1:
            raise KeyError("x")

    with pytest.raises(KeyError):
        measure.kernel_times_us([fails_at_the_second_call], device)
    assert torch.randn(4, device=device).shape == (4,)
    assert measure.kernel_times_us([lambda: torch.ones(4, device=device).add_(1)], device)[0] > 0


def test_in_a_crowd_calls_run_side_by_side(device: torch.device) -> None:
    """Each of four streams has a call that is not timed, and as many as one stream has; an error ends the capture."""
    streams: list[int] = []
    x = torch.ones(4, device=device)

    def called() -> torch.Tensor:
        streams.append(torch.cuda.current_stream(device).cuda_stream)
        return x + 1

    measure.kernel_times_us([called], device)
    alone = len(streams)
    streams.clear()
    with measure.crowded(4):
        (us,) = measure.kernel_times_us([called], device)
        with pytest.raises(EngineError, match="cannot be captured"):
            measure.kernel_times_us([lambda: x.sum().item()], device)
        for last in (3, 4, 7):  # while it warms up, at the first call of the capture, and on its last stream
            made = iter([x] * last)
            with pytest.raises(StopIteration):
                measure.kernel_times_us([lambda made=made: next(made) + 1], device)
    assert us > 0
    assert sorted(Counter(streams).values()) == [alone] * 4
    assert measure.kernel_times_us([called], device)[0] > 0
