"""Inductor's kernels as tasks: compile a module, and let the recorder see each kernel where it is launched.

Everything private of Inductor that the engine relies on is here. Inductor's own reuse of buffers is turned off: it
would make branches wait for each other that have nothing to do with one another.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nimble_jobs.errors import CannotRecord, EngineError

if TYPE_CHECKING:
    from nimble_jobs.engine.recorder import Recorder

PREFIX = "triton."
_RECORDED = {"allow_buffer_reuse": False, "inplace_buffers": False}


def compile_module(
    module: nn.Module,
    *,
    max_autotune: bool = False,
    compiled_before: bool = False,
    eager_random: bool = False,
) -> Callable[..., Any]:
    """The module with Inductor's kernels, for fixed shapes and without graph breaks.

    With `compiled_before` its kernels are expected in its cache, and no compile processes are started. With
    `eager_random` the same random numbers are drawn as in eager. Raises CannotRecord, at the first call, where the
    module cannot be compiled whole.
    """
    options: dict[str, Any] = dict(_RECORDED)
    if max_autotune:
        options |= {"max_autotune": True}
    if eager_random:
        options |= {"fallback_random": True}
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=False, options=options)

    threads = {"compile_threads": 1} if compiled_before else {}

    def call(*inputs: torch.Tensor) -> Any:
        with warnings.catch_warnings(), _quiet(), torch._inductor.config.patch(threads):
            warnings.simplefilter("ignore")  # Inductor's advice to its own users
            try:
                return compiled(*inputs)
            except (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError) as e:
                raise CannotRecord(f"Inductor cannot compile the model: {str(e).splitlines()[0]}") from e

    return call


def stop_compilers() -> None:
    """End Inductor's pool of compile processes, which would go on taking time from the host."""
    from torch._inductor.async_compile import shutdown_compile_workers

    shutdown_compile_workers()


@contextlib.contextmanager
def kernels_to(recorder: Recorder) -> Iterator[None]:
    """While inside, compiled graphs that run report their operators and kernels to `recorder`."""
    try:
        from torch._inductor.output_code import CompiledFxGraph
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    except ImportError as e:
        raise EngineError(f"this torch keeps Inductor's kernels elsewhere ({e}); its kernels are not used") from e
    run: Callable[..., Any] = CachingAutotuner.run
    call: Callable[..., Any] = CompiledFxGraph.__call__

    def recorded_run(self: Any, *args: Any, stream: int, **kwargs: Any) -> Any:
        result = run(self, *args, stream=stream, **kwargs)
        recorder.add_kernel(_Kernel(self), args, kwargs)
        return result

    def recorded_call(self: Any, inputs: Any) -> Any:
        with recorder:
            return call(self, inputs)

    CachingAutotuner.run = recorded_run  # type: ignore[method-assign]
    CompiledFxGraph.__call__ = recorded_call  # type: ignore[method-assign]
    try:
        yield
    finally:
        CachingAutotuner.run = run  # type: ignore[method-assign]
        CompiledFxGraph.__call__ = call  # type: ignore[method-assign]


class _Kernel:
    """One Triton kernel that Inductor compiled and tuned."""

    def __init__(self, autotuner: Any) -> None:
        self._autotuner = autotuner
        try:
            self.name = f"{PREFIX}{autotuner.fn.__name__}"
            names: list[str] = list(autotuner.fn.arg_names)
            mutated = set(autotuner.mutated_arg_names)
        except AttributeError as e:
            raise EngineError(f"this torch describes Inductor's kernels otherwise ({e}); they are not used") from e
        self.write_only = {i for i, n in enumerate(names) if n.startswith("out_ptr")}
        self.updated = {i for i, n in enumerate(names) if n.startswith("in_out_ptr") or n in mutated} - self.write_only

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        self._autotuner.run(*args, stream=stream, **kwargs)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Compilers talk; what they say is not for the job's log unless it is an error."""
    loggers = [logging.getLogger(n) for n in ("torch._inductor", "torch._dynamo")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
