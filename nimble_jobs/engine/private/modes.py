"""Private names around modes: what is seen of the calls inside, and what goes on around a call."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_COMPILING = "_is_compiling_flag"  # of torch.compiler


class DispatchMode(TorchDispatchMode):
    """A mode that sees operators, and keeps the compiler off its own code without importing it.

    torch has its compiler skip what a mode does, and imports all of it to say so, which takes seconds. While nothing
    has imported it, nothing can compile the mode.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        raw = cls.__dict__.get("__torch_dispatch__")
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        if raw is None:
            return
        skipped: Any = cls.__torch_dispatch__

        def dispatch(*args: Any, **kwargs: Any) -> Any:
            return (skipped if "torch._dynamo" in sys.modules else raw)(*args, **kwargs)

        frames: Any = torch._C._dynamo.eval_frame
        strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
        frames.set_code_exec_strategy(dispatch.__code__, strategy)
        cls.__torch_dispatch__ = dispatch  # type: ignore[method-assign]


def modes_off() -> AbstractContextManager[Any]:
    """While inside, no dispatch mode sees what is called."""
    manager: AbstractContextManager[Any] = _disable_current_modes()
    return manager


def functions_off() -> AbstractContextManager[Any]:
    """While inside, no mode over torch's Python functions sees what is called."""
    manager: AbstractContextManager[Any] = torch._C.DisableTorchFunction()
    return manager


def below_autograd() -> AbstractContextManager[Any]:
    """While inside, operators are not differentiated, whatever the grad mode."""
    manager: AbstractContextManager[Any] = torch._C._AutoDispatchBelowAutograd()
    return manager


@contextlib.contextmanager
def as_if_compiled() -> Iterator[None]:
    """While inside, `torch.compiler.is_compiling` says so, as far as this torch lets us: libraries then leave out the
    short cuts that depend on values. Other threads are told the same.
    """
    if not hasattr(torch.compiler, _COMPILING):
        yield
        return
    before = getattr(torch.compiler, _COMPILING)
    setattr(torch.compiler, _COMPILING, True)
    try:
        yield
    finally:
        setattr(torch.compiler, _COMPILING, before)


def backward_call(function: Any) -> Any:
    """What does the same as a function that runs a backward, and is seen by no mode itself, so that modes stay on for
    the Python in that backward; None for other functions.
    """
    if function not in (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward):
        return None

    def call(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(torch.autograd, "has_torch_function", return_value=False):
            if function is torch.Tensor.backward:
                return of_tensor(*args, **kwargs)
            return function(*args, **kwargs)

    def of_tensor(
        tensor: torch.Tensor, gradient: Any = None, retain: Any = None, create: bool = False, **kwargs: Any
    ) -> None:
        retain, create = kwargs.pop("retain_graph", retain), kwargs.pop("create_graph", create)
        torch.autograd.backward(tensor, gradient, retain, create, **kwargs)

    return call


def saved_tensor_hooks() -> bool:
    """Whether the tensors that autograd saves now go through hooks of the caller's."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def in_transform() -> str | None:
    """The transform of torch.func, or the forward-mode derivative, that is at work around this call; else None."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func"
    return "forward-mode differentiation" if torch.autograd.forward_ad._current_level >= 0 else None
