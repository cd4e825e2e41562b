"""What a build is expected to cost and to bring, for one model on one device.

The estimate comes from builds that the store remembers or, if it remembers none, from `docs/measurements`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from nimble_jobs.engine import measure
from nimble_jobs.engine.device import able
from nimble_jobs.payback import Costs
from nimble_jobs.planner.forward.calls import example_of
from nimble_jobs.planner.jobs.loaded import Loaded
from nimble_jobs.plural import count
from nimble_jobs.store.schedules import BuildFacts


@dataclass(frozen=True, kw_only=True)
class _Defaults:
    """A build takes `build_s` and, for each second of one call in eager, `build_calls` seconds more."""

    build_s: float
    build_calls: float
    build_ratio: float
    quick_s: float
    quick_calls: float
    quick_ratio: float
    start_s: float
    move_s: float
    move_calls: float


# On an H200 jobs searched for 23, 25 and 43 s where a call took 6.4, 3.5 and 10.8 ms in eager (h200.md), and 63 s at
# 19 ms (h200-bench-throughput.json). A CUDA graph of eager took 0.10 to 0.29 of eager's time over twelve models at
# batch 1, and the winner 0.18 to 0.59 of the graph's (h200-bench.json); larger batches leave less to gain. A stored
# schedule is loaded in 0.3 to 0.8 s once the model is there, and a process is ready after 3 to 6 s (start.md, h200.md).
# Eager's kernels were captured in 1.1 to 1.5 s beside a job's readers, where a call alone took 5 to 9 ms
# (first-runs.md); nearly all of it grows with the number of tasks, as a call does.
_GPU = _Defaults(
    build_s=12.0,
    build_calls=2000.0,
    build_ratio=0.5,  # of what the quick candidate takes
    quick_s=0.6,
    quick_calls=100.0,
    quick_ratio=0.6,
    start_s=5.0,
    move_s=0.5,
    move_calls=20.0,
)
# On two cores ResNet-18 was built in 4.0 s and ResNet-50 in 8.3 s at 20 and 50 ms a call (start.md). Replays of eager's
# kernels are no faster than eager there; packed weights took 0.25 to 0.76 of its time (kernels.md, text.md).
_CPU = _Defaults(
    build_s=1.0,
    build_calls=140.0,
    build_ratio=0.65,
    quick_s=0.5,
    quick_calls=30.0,
    quick_ratio=1.0,
    start_s=4.0,
    move_s=0.1,
    move_calls=8.0,
)
_BRIEFLY_S = 0.03
_LEAST_QUICK = 0.05  # no replay is faster than that beside eager


def expected(
    builds: Sequence[BuildFacts], *, model: str, on_gpu: bool, call_s: float, quick_ratio: float | None = None
) -> Costs:
    """Costs for a model whose call takes `call_s` in eager. `builds`: those that the store remembers of this device.

    `quick_ratio`: the time of eager's kernels without the gaps between them, divided by that of a batch in the job, if
    both were measured. Builds of the same model count alone if there are any. Times scale with a call's time in eager,
    ratios are medians.
    """
    defaults = _GPU if on_gpu else _CPU
    own = [b for b in builds if b.model == model]
    known = own or list(builds)
    build_s = _build_s(defaults, call_s)
    if known:
        build_s *= median(b.build_s / _build_s(defaults, b.eager_us / 1e6) for b in known)
    if quick_ratio is None:
        quick_ratio = defaults.quick_ratio
    quick_ratio = min(1.0, max(_LEAST_QUICK, quick_ratio))
    over_quick = [b.replay_us / b.quick_us for b in known if b.quick_us]
    if on_gpu:  # what the device does is what a build makes faster; the gaps are gone with the quick candidate
        build_ratio = quick_ratio * min(1.0, median(over_quick) if over_quick else defaults.build_ratio)
    elif known:
        build_ratio = min(1.0, median(b.replay_us / b.eager_us if b.runs == "schedule" else 1.0 for b in known))
    else:
        build_ratio = defaults.build_ratio
    if own:
        source = f"estimated from {count(len(own), 'earlier build')} of this model on this device"
    elif known:
        source = f"estimated from {count(len(known), 'build')} of other models on this device"
    else:
        source = "estimated from other machines, as this one has built nothing yet"
    return Costs(
        quick_s=defaults.quick_s + defaults.quick_calls * call_s,
        quick_ratio=quick_ratio,
        build_s=build_s,
        build_ratio=build_ratio,
        start_s=defaults.start_s,
        move_s=defaults.move_s + defaults.move_calls * call_s,
        source=source,
    )


def kernels_and_call_s(loaded: Loaded, batch_s: float) -> tuple[float, float]:
    """Seconds that a call's kernels take on a GPU without the gaps between them, and that a call takes alone. To be
    used only for a model that carries nothing from call to call. A batch takes the job `batch_s`.

    In the job a call takes longer than alone, because threads that read and write delay its launches. So a call's time
    says how much work it is, but not what the job gains without launches: that is `batch_s` less the kernels' time.

    Of siblings one is measured, which takes as long as a dozen batches. Their batches have about as many tokens, so the
    others have the same shares of the time of a batch.
    """
    siblings = loaded.siblings
    if siblings is not None and siblings.shares is not None:
        kernels, call = siblings.shares
        return kernels * batch_s, call * batch_s
    kernels_s, call_s = _kernels_and_call_s(loaded)
    if siblings is not None and batch_s > 0:
        siblings.shares = kernels_s / batch_s, call_s / batch_s
    return kernels_s, call_s


def _kernels_and_call_s(loaded: Loaded) -> tuple[float, float]:
    example = example_of(loaded.request, loaded.module, loaded.device)

    def call() -> object:
        return loaded.module(example)

    with torch.no_grad():
        (times_us,) = measure.in_turns_us([call], loaded.device, budget_s=_BRIEFLY_S)
        call_us = min(times_us)  # threads of the job still disturb some of these calls
        return measure.kernels_us(call, call_us, loaded.device) / 1e6, call_us / 1e6


def idle_cores(device: torch.device) -> float:
    """Cores that are idle now: all cores less what this process needs, or less the load of the last minute if that is
    more. The load is the whole machine's, so it counts only if this process may use all cores.
    """
    usable = len(os.sched_getaffinity(0))
    load = float(os.getloadavg()[0]) if usable == os.cpu_count() else 0.0
    own = float(torch.get_num_threads()) if not able(device).asynchronous else 1.0
    return max(0.0, usable - max(own, load))


def _build_s(defaults: _Defaults, call_s: float) -> float:
    return defaults.build_s + defaults.build_calls * call_s
