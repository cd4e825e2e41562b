"""What tests of our own kernels share: Triton's interpreter in place of a GPU, and times that nobody measured."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from nimble_jobs.engine import measure
from nimble_jobs.engine.private.runtime import forget_compiled
from tests import prefork

_AS_GPUS_DO = """
import builtins

import numpy
from triton.language import bfloat16, float32
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder

# By default the larger of a number and NaN is the number; the interpreter says NaN
InterpreterBuilder.create_maxnumf = lambda self, left, right: self.binary_op(left, right, numpy.fmax)
InterpreterBuilder.create_minnumf = lambda self, left, right: self.binary_op(left, right, numpy.fmin)
dot = InterpreterBuilder.create_dot


def of_values(self, left, right, *more):  # the interpreter multiplies bf16's bits as if they were whole numbers
    left, right = (self.cast_impl(x, float32) if x.dtype.scalar == bfloat16 else x for x in (left, right))
    return dot(self, left, right, *more)


InterpreterBuilder.create_dot = of_values


class Kind(type):
    def __instancecheck__(cls, value):
        return isinstance(value, builtins.int)


class Int(metaclass=Kind):  # the interpreter makes bounds of loops from arrays of one, which NumPy refuses
    def __new__(cls, value):
        return builtins.int(getattr(value, "item", lambda: value)())


interpreter.int = Int
"""


def interpreted(script: str) -> None:
    """Run a script that compares a kernel, and prints `equal` at its end, in Triton's interpreter.

    It has a process of its own, since the interpreter has to be asked for before Triton is imported.
    """
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = prefork.run_light(_AS_GPUS_DO + script, env=environment, check=False)
    assert done.stdout == "equal\n", done.stderr


def timed_as(monkeypatch: pytest.MonkeyPatch, times: Sequence[float]) -> None:
    """Have each call take so many microseconds. There must be as many calls, and each has to work."""

    def timed(calls: Sequence[Callable[[], object]], _: torch.device) -> list[float]:
        for call in calls:
            call()
        assert len(calls) == len(times)
        return list(times)

    monkeypatch.setattr(measure, "kernel_times_us", timed)


def rewritten(module: Callable[..., Any], *inputs: torch.Tensor, change: Callable[[torch.fx.Graph], object]) -> Any:
    """What a module computes once the graph that a compiler is given was changed. Nothing is compiled."""

    def backend(graph_module: torch.fx.GraphModule, _: Any) -> Any:
        change(graph_module.graph)
        graph_module.graph.lint()
        graph_module.recompile()
        return graph_module.forward

    forget_compiled()
    try:
        with torch.no_grad():
            return torch.compile(module, backend=backend, fullgraph=True, dynamic=False)(*inputs)
    finally:
        forget_compiled()
