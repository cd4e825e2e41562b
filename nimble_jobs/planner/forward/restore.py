"""A stored schedule back over a module: its constants and machine code, and weights laid out or folded."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn

from nimble_jobs import graph
from nimble_jobs.engine import device as devices
from nimble_jobs.engine import verify
from nimble_jobs.engine.capture import Instance
from nimble_jobs.engine.compact import compact
from nimble_jobs.engine.first_calls import quick_without_cudnn, without_cudnn
from nimble_jobs.engine.inputs import Below
from nimble_jobs.engine.observe import Observed, Watched
from nimble_jobs.engine.record import Recording
from nimble_jobs.engine.static_kernel import unpack
from nimble_jobs.errors import CheckFailed, EngineError
from nimble_jobs.graph.memory import MemoryPlan
from nimble_jobs.kernel_switches import Kernel
from nimble_jobs.kernels import depthwise, separable
from nimble_jobs.planner.forward.further import Further
from nimble_jobs.planner.lookup.stored import Material, compiles_again
from nimble_jobs.planner.search.plans import capture_several
from nimble_jobs.planner.sources.source import Kernels, Layout, Source, Variants, record_source
from nimble_jobs.schedule import Schedule

_NONE: Mapping[str, torch.Tensor] = MappingProxyType({})
_OWN_DEPTHWISE = (depthwise.PREFIX, separable.PREFIX)


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A stored schedule, captured and checked."""

    schedule: Schedule
    module: nn.Module  # whose weights the instances read: the given one, or its folded copy
    instances: tuple[Instance, ...]
    further: Further | None = None  # captures those that are not among `instances`


def restore(
    module: nn.Module,
    material: Material,
    example: Mapping[str, torch.Tensor],
    device: torch.device,
    check: Callable[[Sequence[Instance]], object],
    *,
    own: bool = False,
    bound: nn.Module | None = None,
    alike: Callable[[Instance, Instance], object] | None = None,
) -> Restored:
    """Capture a stored schedule over the module's weights, and let `check` raise if an instance is wrong. With
    `own`, weights may be moved. `bound` is the module with the weights folded and merged as the schedule says, if it
    exists already. With `alike` only the first instance is captured, and the others when they are asked for;
    `alike(first, other)` raises CheckFailed if their replays differ.

    Nothing is traced, and nothing compiled unless a kernel cannot do without its compiler. Whatever is raised, the
    module is as it was: CheckFailed, EngineError, OutOfMemory, ValueError.
    """
    schedule = material.schedule
    graph.check_plan(schedule.program, schedule.plan)
    source = source_of(schedule)
    variants = Variants(module)
    instances: tuple[Instance, ...] = ()
    try:
        bound = variants.use(source) if bound is None else bound
        if own:
            compact(bound, device)
        recording = recording_of(material, lambda: record_source(bound, source, example, device, like=schedule.program))
        recording = replace(recording, example=dict(example))
        memory = MemoryPlan(offsets=schedule.offsets, peak_bytes=schedule.arena_bytes)
        count = schedule.in_flight if alike is None else 1
        instances = capture_several(recording, schedule.plan, bound, device, count, memory)
        check(instances)
        devices.clear_workspaces(device)  # of the checks' calls in eager
    except BaseException:
        for instance in instances:
            instance.close()
        variants.use()
        raise

    further: Further | None = None
    if alike is not None and schedule.in_flight > 1:
        first, compare, plan, thread = instances[0], alike, schedule.plan, threading.get_ident()
        kept = replace(recording, example={})  # which lies on the device

        def another() -> Instance:
            again = threading.get_ident() == thread
            of = kept if again else replace(kept, example=dict(first.inputs))
            (made,) = capture_several(of, plan, bound, device, 1, memory, again=again)
            return made

        further = Further(first, schedule.in_flight - 1, another, lambda made: compare(first, made))
    return Restored(schedule=schedule, module=bound, instances=instances, further=further)


def check_loaded(
    instances: Sequence[Instance],
    eager: Callable[..., Any],
    schedule: Schedule,
    device: torch.device,
    *,
    tolerance: float,
    seed: int,
    below: Below = 2,
    integers: Mapping[str, torch.Tensor] = _NONE,
    observed: Observed | None = None,
    example: Mapping[str, torch.Tensor] = _NONE,
) -> float:
    """`verify.check` of instances that were loaded. On a GPU, eager first does without cuDNN's attention and, if the
    schedule has depthwise convolutions of ours or few pictures, without its convolutions: their first calls take long.
    Returns the worst relative norm. Raises CheckFailed.
    """

    def against(call: Callable[..., Any]) -> float:
        ports = schedule.program.inputs
        return verify.check(
            instances[0],
            call,
            ports,
            device,
            tolerance=tolerance,
            seed=seed,
            below=below,
            integers=integers,
            observed=observed,
            example=example,
            others=instances[1:],
        )

    program, on_gpu = schedule.program, devices.able(device).kernels
    module, sizes = eager.module if isinstance(eager, Watched) else eager, [port.view.shape for port in program.inputs]
    convolutions = any(task.op.startswith(_OWN_DEPTHWISE) for task in program.tasks) or (
        on_gpu and isinstance(module, nn.Module) and quick_without_cudnn(module, sizes)
    )
    if convolutions or on_gpu:
        # Without cuDNN, eager rounds differently and needs more memory. If that fails, eager with cuDNN decides.
        with contextlib.suppress(CheckFailed, torch.OutOfMemoryError):
            return against(without_cudnn(eager, convolutions=convolutions))
    return against(eager)


def source_of(schedule: Schedule) -> Source:
    """The kernels and the memory format of a schedule. Raises ValueError if it names kernels that do not exist."""
    kernels, layout = cast(Kernels, schedule.kernels), cast(Layout, schedule.layout)
    without = frozenset(Kernel(name) for name in schedule.without)
    return Source(kernels=kernels, layout=layout, folded=schedule.folded, merged=schedule.merged, without=without)


def recording_of(material: Material, record: Callable[[], Recording]) -> Recording:
    """What was recorded when the schedule was built. Kernels that cannot do without their compiler are compiled again,
    by `record`. Raises EngineError if others come of that.
    """
    schedule = material.schedule
    if compiles_again(schedule):
        recording = record()
        if recording.program != schedule.program:
            raise EngineError("the compiler generated different kernels from the ones that were measured")
        return recording
    code = unpack(schedule.compiled, material.binaries)
    return Recording(program=schedule.program, constants=dict(material.constants), kernels={**code})
