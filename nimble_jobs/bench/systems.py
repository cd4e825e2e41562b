"""How each system is prepared. A preparation yields every system of its family, one after another, ready to run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nimble_jobs.bench import other_runtimes
from nimble_jobs.bench.cell import Cell
from nimble_jobs.bench.runners import CallRunner, Runner, StaticRunner, Tensors
from nimble_jobs.engine.private import forget_compiled
from nimble_jobs.engine.record import flatten_outputs
from nimble_jobs.errors import EngineError, UsageError

Ready = tuple[str, Runner]
_WARM_CALLS = 3  # the first compiles, the second may capture, the third runs what was captured


def prepare(family: str, cell: Cell, layout: str) -> Iterator[Ready]:
    """Name and runner of each system of a family other than ours. Raises whatever a system raises."""
    return _PREPARATIONS[family](cell, layout)


def _eager(cell: Cell, layout: str) -> Iterator[Ready]:
    yield "eager", _warm(CallRunner(cell.module(layout), cell.device), cell, layout)


def _torchscript(cell: Cell, layout: str) -> Iterator[Ready]:
    example = tuple(cell.inputs(layout)[0].values())
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # tracing is deprecated, and says so for every line of a model
        traced = torch.jit.trace(cell.module(layout), example, check_trace=False, strict=False)
        frozen = torch.jit.freeze(traced.eval())
    yield "torchscript", _warm(CallRunner(frozen, cell.device), cell, layout)


def _cuda_graph(cell: Cell, layout: str) -> Iterator[Ready]:
    yield "cuda-graph", _captured(cell.module(layout), cell, layout)


def _compile_default(cell: Cell, layout: str) -> Iterator[Ready]:
    compiled = _compiled(cell, layout, None)
    yield "compile-default", _warm(CallRunner(compiled, cell.device), cell, layout)
    yield "compile-default+graph", _captured(compiled, cell, layout)


def _compile_reduce_overhead(cell: Cell, layout: str) -> Iterator[Ready]:
    _needs_cuda(cell)
    compiled = _compiled(cell, layout, "reduce-overhead")
    yield "compile-reduce-overhead", _warm(CallRunner(compiled, cell.device), cell, layout)


def _compile_max_autotune(cell: Cell, layout: str) -> Iterator[Ready]:
    _needs_cuda(cell)
    compiled = _compiled(cell, layout, "max-autotune")
    yield "compile-max-autotune", _warm(CallRunner(compiled, cell.device), cell, layout)


def _compile_max_autotune_graph(cell: Cell, layout: str) -> Iterator[Ready]:
    _needs_cuda(cell)
    compiled = _compiled(cell, layout, "max-autotune-no-cudagraphs")
    yield "compile-max-autotune+graph", _captured(compiled, cell, layout)


def _compiled(cell: Cell, layout: str, mode: str | None) -> Callable[..., Any]:
    forget_compiled()
    compiled: Callable[..., Any] = torch.compile(cell.module(layout), mode=mode, dynamic=False)
    return compiled


def _warm(runner: Runner, cell: Cell, layout: str) -> Runner:
    inputs = cell.inputs(layout)
    with torch.no_grad():
        for turn in range(_WARM_CALLS):
            runner.load(inputs[turn])
            runner.run()
    return runner


def _captured(call: Callable[..., Any], cell: Cell, layout: str) -> Runner:
    """One CUDA graph around a function, over input buffers of its own."""
    _needs_cuda(cell)
    static = {n: t.clone() for n, t in cell.inputs(layout)[0].items()}
    return capture(call, static, cell.device)


def capture(call: Callable[..., Any], static: Tensors, device: torch.device) -> Runner:
    """A CUDA graph of `call(*static.values())`. Raises EngineError where it cannot be captured."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.no_grad():
        with torch.cuda.stream(stream):
            for _ in range(_WARM_CALLS):
                call(*static.values())
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=stream):
                outputs = flatten_outputs(call(*static.values()))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as e:
            raise EngineError(f"cannot be captured: {str(e).splitlines()[0]}") from e
    graph.replay()
    return StaticRunner(graph.replay, static, lambda: outputs, graph.reset)


def _needs_cuda(cell: Cell) -> None:
    if cell.device.type != "cuda":
        raise UsageError("needs a CUDA device")


_PREPARATIONS: dict[str, Callable[[Cell, str], Iterator[Ready]]] = {
    "eager": _eager,
    "torchscript": _torchscript,
    "cuda-graph": _cuda_graph,
    "compile-default": _compile_default,
    "compile-reduce-overhead": _compile_reduce_overhead,
    "compile-max-autotune": _compile_max_autotune,
    "compile-max-autotune+graph": _compile_max_autotune_graph,
    "onnxruntime": other_runtimes.onnxruntime,
    "tensorrt": other_runtimes.tensorrt,
}
