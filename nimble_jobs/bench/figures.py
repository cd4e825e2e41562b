"""Everything that is measured of a system that is ready to run, in the same order for each."""

from __future__ import annotations

import traceback
from typing import Any

from nimble_jobs.bench.busy import busy
from nimble_jobs.bench.cell import Batches
from nimble_jobs.bench.memory import Meter
from nimble_jobs.bench.runners import Runner
from nimble_jobs.bench.settings import Settings
from nimble_jobs.bench.timing import copy_times, replay_times


def figures(
    cell: Batches, runner: Runner, layout: str, settings: Settings, meter: Meter, *, own_allocator: bool = False
) -> dict[str, Any]:
    """Fields of a row: difference from eager, times, memory, idle share. Raises CheckFailed for a wrong output."""
    norm = cell.check(runner, layout)
    meter.settle()
    replay = replay_times(runner, cell.inputs(layout), cell.device, budget_s=settings.sample_s)
    copies = copy_times(runner, cell.inputs_on_host(layout), cell.device, budget_s=settings.sample_s)
    peak_bytes = meter.running(own_allocator=own_allocator)
    try:
        seen = busy(runner, cell.device) if settings.idle else None
    except RuntimeError:  # the profiler may be forbidden here; the times stand without it
        traceback.print_exc()
        seen = None
    return {
        "relative_norm": norm,
        "replay_us": replay.median,
        "replay_low_us": replay.low,
        "replay_high_us": replay.high,
        "with_copies_us": copies.median,
        "records_per_s": cell.batch / replay.median * 1e6,
        "records_per_s_with_copies": cell.batch / copies.median * 1e6,
        "peak_bytes": peak_bytes,
        "busy_us": seen.union_us if seen else None,
        "kernels": seen.kernels if seen else None,
        "idle_share": max(0.0, 1 - seen.union_us / replay.median) if seen else None,
    }
