"""The quick candidate: eager's kernels on one stream, weights as they lie. It is checked, but not stored."""

from __future__ import annotations

import torch

from nimble_jobs.engine.device import synchronize
from nimble_jobs.errors import DeviceFault, EngineError, OutOfMemory, first_line
from nimble_jobs.planner.forward.build import build_best, example_of, memory_left
from nimble_jobs.planner.jobs.loaded import Loaded
from nimble_jobs.planner.keys.options import BuildOptions
from nimble_jobs.planner.keys.request import Request, tolerance_of


def build_quickly(loaded: Loaded) -> None:
    """Give a loaded model the quick candidate, or the reason for eager. Raises OutOfMemory, DeviceFault."""
    request = loaded.request
    example = example_of(request, loaded.module, loaded.device)
    try:
        built = build_best(loaded.module, {"x": example}, loaded.key, _options(request, loaded), loaded.device)
    except EngineError as e:
        explain(loaded, e)
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


def explain(loaded: Loaded, error: EngineError) -> None:
    """Why there is no schedule. Raises the error again where the next attempt, on an empty device, may have one."""
    if isinstance(error, DeviceFault) or (isinstance(error, OutOfMemory) and loaded.request.memory_bytes is None):
        raise error
    loaded.fallback = f"no schedule could be built: {error}"
    loaded.unschedulable = not isinstance(error, OutOfMemory)


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
