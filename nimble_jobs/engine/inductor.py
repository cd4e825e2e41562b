"""Inductor's kernels as tasks: compile a module, and let the recorder see each kernel where it is launched.

Everything private of Inductor that the engine relies on is here. Inductor's own reuse of buffers is turned off: it
would make branches wait for each other that have nothing to do with one another.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nimble_jobs.engine.private.runtime import forget_compiled, tested_version
from nimble_jobs.engine.static_kernel import StaticKernel
from nimble_jobs.errors import CannotRecord, EngineError

if TYPE_CHECKING:
    from nimble_jobs.engine.recorder import Recorder

PREFIX = "triton."
_RECORDED = {
    "allow_buffer_reuse": False,
    "inplace_buffers": False,
    "triton.mix_order_reduction": False,  # its kernels leave part of their work in memory that nothing says they write
    "triton.unique_kernel_names": False,  # machine code lies in files of that name, and is not found where it is long
}


def compile_module(
    module: nn.Module,
    *,
    max_autotune: bool = False,
    compiled_before: bool = False,
    eager_random: bool = False,
    rewrite: Callable[[torch.fx.Graph], object] | None = None,
    last: Any = None,
    most_reads: int | None = None,
) -> Callable[..., Any]:
    """The module with Inductor's kernels, for fixed shapes and without graph breaks.

    With `compiled_before` its kernels are expected in its cache, and no compile processes are started. With
    `eager_random` the same random numbers are drawn as in eager. `rewrite` changes the graph of torch's functions
    before Inductor sees it, and `last`, a `graph_pass`, that of operators before Inductor makes kernels. `most_reads`:
    a value that several kernels need is stored if computing it takes more reads than this; without it, each kernel
    computes the value anew up to four reads. Raises CannotRecord, at the first call, where the module cannot be
    compiled whole.
    """
    options: dict[str, Any] = dict(_RECORDED)
    if max_autotune:
        options |= {"max_autotune": True}
    if eager_random:
        options |= {"fallback_random": True}
    if most_reads is not None:
        options |= {"realize_reads_threshold": most_reads}
    if last is not None:
        options |= {"post_grad_custom_post_pass": last}
    forget_compiled()
    named = {"options": options} if rewrite is None else {"backend": _rewriting(options, rewrite)}
    compiled = torch.compile(module, fullgraph=True, dynamic=False, **named)

    threads = {"compile_threads": 1} if compiled_before else {}

    def call(*inputs: torch.Tensor) -> Any:
        with refusing_compilers("the model"), _quiet(), _quick_bounds(), torch._inductor.config.patch(threads):
            return compiled(*inputs)

    return call


def _rewriting(options: dict[str, Any], rewrite: Callable[[torch.fx.Graph], object]) -> Callable[..., Any]:
    """Inductor as a backend that is given a graph which `rewrite` has changed."""
    inductor: Any = torch._TorchCompileInductorWrapper(None, options, False)

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        rewrite(module.graph)
        module.graph.lint()
        module.recompile()
        return inductor(module, inputs)

    return backend


def graph_pass(rewrite: Callable[[torch.fx.Graph], object], files: Sequence[Path], settings: Callable[[], str]) -> Any:
    """A pass over Inductor's graph of operators, for `compile_module`.

    Inductor keeps compiled graphs by the source in `files` and by what `settings` gives when a graph is compiled: these
    must be all that `rewrite` goes by.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class Rewriting(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            rewrite(graph)

        def uuid(self) -> Any:
            return get_hash_for_files(tuple(map(str, files)), settings())

    return Rewriting()


@contextlib.contextmanager
def refusing_compilers(what: str) -> Iterator[None]:
    """Around the first run of compiled code, which `what` names. Raises CannotRecord if Inductor cannot compile it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Inductor's advice to its own users
        try:
            yield
        except (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError) as e:
            said = str(e).strip().partition("\n")[0]
            raise CannotRecord(f"Inductor cannot compile {what}: {said}") from e


@contextlib.contextmanager
def kernels_to(recorder: Recorder) -> Iterator[None]:
    """While inside, compiled graphs that run report their operators and kernels to `recorder`."""
    try:
        from torch._inductor.output_code import CompiledFxGraph
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    except ImportError as e:
        raise EngineError(f"this torch version keeps Inductor's kernels elsewhere ({e}), so they are not used") from e
    run: Callable[..., Any] = CachingAutotuner.run
    call: Callable[..., Any] = CompiledFxGraph.__call__

    thread = threading.get_ident()

    def recorded_run(self: Any, *args: Any, stream: int, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return run(self, *args, stream=stream, **kwargs)
        with _launches_of(self) as launches:
            result = run(self, *args, stream=stream, **kwargs)
        static = _static(self, launches)
        if static is not None:
            recorder.add_kernel(static[0], static[1], {})
        else:
            recorder.add_kernel(_Autotuned(self), args, kwargs)
        return result

    def recorded_call(self: Any, inputs: Any) -> Any:
        if threading.get_ident() != thread:
            return call(self, inputs)
        with recorder:
            return call(self, inputs)

    CachingAutotuner.run = recorded_run  # type: ignore[method-assign]
    CompiledFxGraph.__call__ = recorded_call  # type: ignore[method-assign]
    try:
        yield
    finally:
        CachingAutotuner.run = run  # type: ignore[method-assign]
        CompiledFxGraph.__call__ = call  # type: ignore[method-assign]


class _Autotuned:
    """A Triton kernel that only Inductor can launch."""

    def __init__(self, autotuner: Any) -> None:
        self._autotuner = autotuner
        self.identity = autotuner
        self.name, names = _names(autotuner)
        self.write_only, self.updated = _written(autotuner, names)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        self._autotuner.run(*args, stream=stream, **kwargs)


@dataclass(frozen=True)
class _Launch:
    """What torch's launcher of machine code was given."""

    kernel: Any
    grid: tuple[int, int, int]
    warps: int
    shared_bytes: int
    arg_types: str
    args: tuple[Any, ...]


@contextlib.contextmanager
def _launches_of(autotuner: Any) -> Iterator[list[_Launch]]:
    """While inside, note what the autotuner's only launcher gives to torch's; nothing if it launches otherwise."""
    launches: list[_Launch] = []
    launcher: Any = autotuner.launchers[0] if len(autotuner.launchers) == 1 else None
    if not getattr(launcher, "_is_static", False):
        yield launches
        return
    kernel = launcher.__globals__["runner"].__self__
    real = kernel.C_impl

    class Spy:
        @staticmethod
        def _launch_kernel(
            function: int, x: int, y: int, z: int, warps: int, shared: int, types: str, args: Any, stream: int
        ) -> None:
            real._launch_kernel(function, x, y, z, warps, shared, types, args, stream)
            launches.append(_Launch(kernel, (x, y, z), warps, shared, types, tuple(args)))

    kernel.__dict__["C_impl"] = Spy  # in the place of a cached property
    try:
        yield launches
    finally:
        kernel.__dict__["C_impl"] = real


def _static(autotuner: Any, launches: list[_Launch]) -> tuple[StaticKernel, tuple[Any, ...]] | None:
    """The kernel without its compiler, and the arguments of its launch; None if it cannot do without."""
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
    from torch._inductor.runtime.runtime_utils import triton_hash_to_path_key

    if len(launches) != 1:
        return None
    (launch,) = launches
    kernel = launch.kernel
    passed = [n for i, n in enumerate(kernel.arg_names) if i not in kernel.full_constexprs]
    scratch = launch.args[len(passed) :]  # reserved by compilers, and never used
    if len(launch.args) < len(passed) or any(a is not None for a in scratch):
        return None
    folder = Path(triton_cache_dir(autotuner.triton_meta.get("device", 0)))
    file = folder / triton_hash_to_path_key(kernel.hash) / f"{kernel.name}.cubin"
    if not file.is_file():
        return None
    name, _ = _names(autotuner)
    write_only, updated = _written(autotuner, passed)
    return StaticKernel(
        name=name,
        function=kernel.name,
        binary=file.read_bytes(),
        grid=launch.grid,
        warps=launch.warps,
        shared_bytes=launch.shared_bytes,
        arg_types=launch.arg_types,
        write_only=write_only,
        updated=updated,
    ), launch.args[: len(passed)]


def _names(autotuner: Any) -> tuple[str, list[str]]:
    """The kernel's name, and those of its parameters."""
    try:
        return f"{PREFIX}{autotuner.inductor_meta['kernel_name']}", list(autotuner.fn.arg_names)
    except (AttributeError, KeyError) as e:
        raise EngineError(
            f"this torch version describes Inductor's kernels differently ({e}); they are not used"
        ) from e


def _written(autotuner: Any, names: list[str]) -> tuple[set[int], set[int]]:
    """Positions of the parameters that are filled, and of those that are updated."""
    mutated = set(autotuner.mutated_arg_names)
    filled = {i for i, n in enumerate(names) if n.startswith("out_ptr")}
    changed = {i for i, n in enumerate(names) if n.startswith(("in_out_ptr", "ws_ptr")) or n in mutated}
    return filled, changed - filled


@contextlib.contextmanager
def _quick_bounds() -> Iterator[None]:
    """While inside, Inductor computes bounds of windows, such as those of average pools, with torch's own Min and Max.

    It takes sympy's, which look for the largest of symbols whenever an expression changes: a quarter of the time for
    the cells of NASNet. For fixed shapes the code that comes of it is the same.
    """
    try:
        from torch._inductor import lowering
        from torch.utils._sympy.functions import Max, Min
    except ImportError:
        yield
        return
    theirs = sys.modules.get("sympy")
    if theirs is None or tested_version() is not None:
        yield
        return

    class Sympy(ModuleType):
        def __getattr__(self, name: str) -> Any:
            return getattr(theirs, name)

    quick: Any = Sympy("sympy")
    quick.Max, quick.Min = Max, Min
    lowering.sympy = quick  # type: ignore[attr-defined]  # a module that it imports
    try:
        yield
    finally:
        lowering.sympy = theirs  # type: ignore[attr-defined]


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
