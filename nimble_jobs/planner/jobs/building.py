"""Builds for a loaded model: the whole search, or the quick candidate.

The quick candidate has eager's kernels on one stream, with the weights as they lie. It is checked, but not stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from nimble_jobs.engine.device import synchronize
from nimble_jobs.errors import DeviceFault, EngineError, OutOfMemory, first_line
from nimble_jobs.models import identity
from nimble_jobs.planner.forward.build import build_best, build_result, build_schedule, memory_left
from nimble_jobs.planner.forward.calls import example_of
from nimble_jobs.planner.jobs.loaded import Loaded, Report, build_module
from nimble_jobs.planner.keys.options import BuildOptions
from nimble_jobs.planner.keys.request import Request, tolerance_of
from nimble_jobs.planner.lookup.obtain import BuildResult, check_unchanged
from nimble_jobs.planner.lookup.siblings import precedent_of
from nimble_jobs.planner.lookup.stored import Refused
from nimble_jobs.store import Store


def build_new(loaded: Loaded, parts: Mapping[str, str], store: Store, report: Report) -> BuildResult[Loaded] | Refused:
    """Search for the fastest schedule of a loaded model, or take over the choice of a sibling in the store.

    Raises OutOfMemory, DeviceFault, StoreError.
    """
    report(phase="build")
    precedent = precedent_of(parts, store)

    def say(candidate: str) -> None:
        report(phase="build", schedule={"trying": candidate})

    try:
        built = build_schedule(loaded.module, loaded.request, loaded.key, loaded.device, say=say, precedent=precedent)
    except EngineError as e:
        fallback = _note_failure(loaded, e)
        return Refused(reason=fallback, fallback=fallback)
    loaded.schedule = built.schedule
    if built.failure is None:
        loaded.module, loaded.instances, loaded.observed = built.module, built.instances, built.observed
    return build_result(built, parts, loaded, meaning="the schedule is quarantined: ")


def build_apart(
    loaded: Loaded, parts: Mapping[str, str], store: Store, report: Report
) -> BuildResult[Loaded] | Refused:
    """`build_new` over weights of its own, because a build may move them. The caller must load what was stored."""
    module = build_module(loaded.request, loaded.device)
    spare = Loaded(key=loaded.key, request=loaded.request, device=loaded.device, module=module)
    try:
        made = build_new(spare, parts, store, report)
        loaded.fallback, loaded.unschedulable = spare.fallback, spare.unschedulable
    finally:
        spare.close()
    return made if isinstance(made, Refused) else replace(made, value=loaded, close=lambda: None)


def check_code(request: Request, parts: Mapping[str, str]) -> None:
    """Raises ModelChanged if the model's code is no longer what the key says, whose parts were made before it ran."""
    check_unchanged({n: v for n, v in parts.items() if n.startswith("model.")}, identity(request.model))


def build_quickly(loaded: Loaded) -> None:
    """Give a loaded model the quick candidate, or the reason for eager. Raises OutOfMemory, DeviceFault."""
    request = loaded.request
    example = example_of(request, loaded.module, loaded.device)
    try:
        built = build_best(loaded.module, {"x": example}, loaded.key, _options(request, loaded), loaded.device)
    except EngineError as e:
        _note_failure(loaded, e)
        return
    if built.failure is not None:
        loaded.fallback = built.failure
        built.close()
    else:
        loaded.schedule, loaded.instances, loaded.observed = built.schedule, built.instances, built.observed


def capture_quickly(loaded: Loaded, eager_us: float) -> str | None:
    """Give a model that runs in eager the quick candidate, between two batches: None, or the reason why it stays.

    Nothing but one replay is timed: a call in eager takes `eager_us`, as the job has measured. Raises DeviceFault.
    """
    request = loaded.request
    options = _options(request, loaded, quick=True)
    example = example_of(request, loaded.module, loaded.device)
    try:
        built = build_best(loaded.module, {"x": example}, loaded.key, options, loaded.device, eager_us=eager_us)
    except DeviceFault:
        raise
    except (EngineError, torch.OutOfMemoryError) as e:
        return f"it cannot be captured: {first_line(e)}"
    reason = built.failure
    if reason is None and built.observed.changing:
        reason = f"the model carries {next(iter(built.observed.changing))!r} from batch to batch"
    if reason is None and built.schedule.replay_us >= eager_us:
        reason = f"a replay takes {built.schedule.replay_us / 1e3:.4g} ms, a call in eager {eager_us / 1e3:.4g} ms"
    if reason is not None:
        built.close()
        return reason
    loaded.schedule, loaded.instances, loaded.observed = built.schedule, built.instances, built.observed
    synchronize(loaded.device)
    return None


def _note_failure(loaded: Loaded, error: EngineError) -> str:
    """Note and return why there is no schedule. Raises the error again if it may not come again once the device is
    empty.
    """
    if isinstance(error, DeviceFault) or (isinstance(error, OutOfMemory) and loaded.request.memory_bytes is None):
        raise error
    loaded.fallback = f"no schedule could be built: {error}"
    loaded.unschedulable = not isinstance(error, OutOfMemory)
    return loaded.fallback


def _options(request: Request, loaded: Loaded, *, quick: bool = False) -> BuildOptions:
    return BuildOptions(
        streams=1,
        fuse="off",
        layout="given",
        in_flight=1,
        tolerance=tolerance_of(request),
        memory_bytes=memory_left(request, loaded.module),
        eager="reference" if quick else "candidate",
        quick=quick,
    )
