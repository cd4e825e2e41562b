"""What is left out because its first calls take long, and what is loaded ahead."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from nimble_jobs.engine import first_calls
from nimble_jobs.engine.first_calls import load_comparison, load_operators, loading_operators, without_cudnn
from tests.waiting import PATIENCE_S

GPU = torch.device("cuda:7")


def settings() -> tuple[bool, bool]:
    return torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cudnn.enabled


@pytest.mark.parametrize("convolutions", [True, False])
def test_cudnn_is_spared_while_the_call_lasts(convolutions: bool) -> None:
    def call(fails: bool) -> tuple[bool, bool]:
        if fails:
            raise ValueError
        return settings()

    before = settings()
    assert without_cudnn(call, convolutions=convolutions)(False) == (False, before[1] and not convolutions)
    with pytest.raises(ValueError):  # noqa: PT011
        without_cudnn(call, convolutions=convolutions)(True)
    assert settings() == before


def test_a_model_that_freezes_torchs_flags_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch then refuses to write them by their names, which is meant for the model's own code."""
    monkeypatch.setitem(torch.backends.flags_frozen.__globals__, "__allow_nonbracketed_mutation_flag", False)
    assert torch.backends.flags_frozen()
    with pytest.raises(RuntimeError, match="not allowed to set"):
        torch.backends.cudnn.enabled = False
    before = settings()
    assert without_cudnn(settings, convolutions=True)() == (False, False)
    assert settings() == before


def test_the_comparison_runs_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for tensors that would be compared on the host."""
    monkeypatch.setattr(torch.Tensor, "cpu", lambda _: pytest.fail("copied to the host"))
    load_comparison(torch.device("cpu"))


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What `load_operators` was called with, in a process that has called nothing yet."""
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(first_calls, "_loaded", set())
    monkeypatch.setattr(first_calls, "load_operators", lambda *given, pictures: found.append((*given, pictures)))
    return found


@pytest.mark.parametrize(
    ("pictures", "names"),
    [(True, {"aten::convolution", "aten::addmm"}), (False, {"aten::native_layer_norm", "aten::gelu", "aten::addmm"})],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_operators_are_called_in_the_dtype_of_the_model(
    dtype: torch.dtype, pictures: bool, names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They change nothing, and draw no random numbers."""
    seen: set[tuple[str, torch.dtype]] = set()
    monkeypatch.setattr(first_calls, "_loaded", set())
    before = settings(), torch.get_rng_state()

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.update((op.name(), t.dtype) for t in args if isinstance(t, torch.Tensor) and t.is_floating_point())
            return op(*args, **(kwargs or {}))

    with Watch():
        load_operators(torch.device("cpu"), dtype, pictures=pictures)
    assert {kind for _, kind in seen} == {dtype}
    called = {name for name, _ in seen}
    assert names <= called
    assert ("aten::convolution" in called) is pictures
    assert settings() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_operators_are_loaded_beside_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the block ends after them."""
    begun, goes_on, ended = threading.Event(), threading.Event(), threading.Event()

    def load(*_: object, **__: object) -> None:
        begun.set()
        if goes_on.wait(PATIENCE_S):
            ended.set()

    monkeypatch.setattr(first_calls, "_loaded", set())
    monkeypatch.setattr(first_calls, "load_operators", load)
    with loading_operators(GPU, torch.float16, pictures=True):
        assert begun.wait(PATIENCE_S)
        assert not ended.is_set()
        goes_on.set()
    assert ended.is_set()


def test_operators_are_loaded_once(loads: list[tuple[Any, ...]]) -> None:
    first_calls._loaded.add((GPU, torch.float16, True))
    for device, dtype in ((GPU, torch.float16), (GPU, torch.float32), (torch.device("cpu"), torch.float32)):
        with loading_operators(device, dtype, pictures=True):
            pass
    assert loads == [(GPU, torch.float32, True)]


def test_what_cannot_be_loaded_is_left_to_the_model(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The block runs, and what it raises comes through."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(first_calls, "_loaded", set())
    monkeypatch.setattr(first_calls, "load_operators", refuse)
    with (
        caplog.at_level("DEBUG", logger="nimble_jobs.engine.first_calls"),
        pytest.raises(ValueError, match="of the block"),
        loading_operators(GPU, torch.float16, pictures=True),
    ):
        raise ValueError("of the block")
    assert "no kernel image" in caplog.text
