"""How each system is prepared. A preparation yields every system of its family, one after another, ready to run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nimble_jobs.bench import other_runtimes
from nimble_jobs.bench.cell import Cell
from nimble_jobs.bench.runners import WARM_CALLS, CallRunner, Runner, StaticRunner, capture
from nimble_jobs.engine.private.runtime import forget_compiled
from nimble_jobs.engine.record import flatten_outputs
from nimble_jobs.errors import UsageError

Ready = tuple[str, Runner]


# Families of torch.compile, with the mode that each asks for; one with its own CUDA graphs must not be captured again.
_MODES = {
    "compile-default": None,
    "compile-reduce-overhead": "reduce-overhead",
    "compile-max-autotune": "max-autotune",
    "compile-max-autotune+graph": "max-autotune-no-cudagraphs",
}
_CAPTURED = {"cuda-graph", "compile-default", "compile-max-autotune+graph"}
_ON_CPU = {"eager", "torchscript", "compile-default"}
_OTHERS = {"onnxruntime": other_runtimes.onnxruntime, "tensorrt": other_runtimes.tensorrt}


def prepare(family: str, cell: Cell, layout: str) -> Iterator[Ready]:
    """Name and runner of each system of a family other than ours. Raises whatever a system raises."""
    if family in _OTHERS:
        yield from _OTHERS[family](cell, layout)
        return
    if family not in _ON_CPU:
        _needs_cuda(cell)
    call = _callable(family, cell, layout)
    if family not in _CAPTURED or family == "compile-default":
        yield family, _warm(CallRunner(call, cell.device), cell, layout)
    if family in _CAPTURED:
        name = "compile-default+graph" if family == "compile-default" else family
        yield name, _captured(call, cell, layout)


def _callable(family: str, cell: Cell, layout: str) -> Callable[..., Any]:
    module = cell.module(layout)
    if family in _MODES:
        forget_compiled()
        compiled: Callable[..., Any] = torch.compile(module, mode=_MODES[family], dynamic=False)
        return compiled
    if family != "torchscript":
        return module
    example = tuple(cell.inputs(layout)[0].values())
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # tracing is deprecated, and says so for every line of a model
        traced = torch.jit.trace(module, example, check_trace=False, strict=False)
        frozen: Callable[..., Any] = torch.jit.freeze(traced.eval())
    return frozen


def _warm(runner: Runner, cell: Cell, layout: str) -> Runner:
    inputs = cell.inputs(layout)
    with torch.no_grad():
        for turn in range(WARM_CALLS):
            runner.load(inputs[turn])
            runner.run()
    return runner


def _captured(call: Callable[..., Any], cell: Cell, layout: str) -> Runner:
    """One CUDA graph around a function, over input buffers of its own."""
    _needs_cuda(cell)
    static = {n: t.clone() for n, t in cell.inputs(layout)[0].items()}
    with torch.no_grad():
        graph, outputs = capture(lambda: flatten_outputs(call(*static.values())), cell.device)
    graph.replay()
    return StaticRunner(graph.replay, static, lambda: outputs, graph.reset)


def _needs_cuda(cell: Cell) -> None:
    if cell.device.type != "cuda":
        raise UsageError("needs a CUDA device")
