"""Metric families about workers, GPUs and this exposition itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from nimble_jobs.metrics.family import Family, Kind, Samples
from nimble_jobs.metrics.gpus import Gpu
from nimble_jobs.metrics.labels import label
from nimble_jobs.metrics.sight import Sight
from nimble_jobs.metrics.workers import STATES, Worker
from nimble_jobs.version import __version__


def _states(sight: Sight) -> Samples:
    counts = Counter(worker.state for worker in sight.workers)
    return [((state,), counts[state]) for state in STATES]


def _worker(value: Callable[[Worker], float | None]) -> Callable[[Sight], Samples]:
    def read(sight: Sight) -> Samples:
        for worker in sight.workers:
            if (found := value(worker)) is not None:
                yield (label(worker.slot), label(worker.device)), found

    return read


def _gpu(value: Callable[[Gpu], float | None]) -> Callable[[Sight], Samples]:
    def read(sight: Sight) -> Samples:
        for gpu in sight.gpus:
            if (found := value(gpu)) is not None:
                yield (str(gpu.index), label(gpu.uuid)), found

    return read


def _gpu_names(sight: Sight) -> Samples:
    return [((str(gpu.index), label(gpu.uuid), label(gpu.name)), 1) for gpu in sight.gpus]


_WORKER = ("worker", "device")
_GPU = ("gpu", "uuid")

_WORKERS = (
    Family(
        name="nimble_jobs_workers",
        kind=Kind.GAUGE,
        labels=("state",),
        help="Workers on this machine, by what they do. waits, still, stuck and deaf are explained by: worker ls.",
        read=_states,
    ),
    Family(
        name="nimble_jobs_worker_stall_seconds",
        kind=Kind.GAUGE,
        labels=_WORKER,
        help="Time since the worker's job last made progress. Left out for a worker without a job.",
        read=_worker(lambda worker: worker.still_s),
        optional=True,
    ),
    Family(
        name="nimble_jobs_resident_schedules",
        kind=Kind.GAUGE,
        labels=_WORKER,
        help="Schedules whose captured graphs the worker holds on its device.",
        read=_worker(lambda worker: worker.residents),
        optional=True,
    ),
    Family(
        name="nimble_jobs_resident_bytes",
        kind=Kind.GAUGE,
        labels=_WORKER,
        help="Device memory that the worker's resident models and graphs take.",
        read=_worker(lambda worker: worker.residents_bytes),
        optional=True,
    ),
)

_GPUS = (
    Family(
        name="nimble_jobs_gpu_names",
        kind=Kind.GAUGE,
        labels=(*_GPU, "name"),
        help="1 for each GPU of this machine, with its name. Without an NVIDIA driver there are no GPU metrics.",
        read=_gpu_names,
        optional=True,
    ),
    Family(
        name="nimble_jobs_gpu_utilization_ratio",
        kind=Kind.GAUGE,
        labels=_GPU,
        help="Share of the driver's last sampling period in which a kernel ran, from 0 to 1.",
        read=_gpu(lambda gpu: gpu.used_share),
        optional=True,
    ),
    Family(
        name="nimble_jobs_gpu_memory_used_bytes",
        kind=Kind.GAUGE,
        labels=_GPU,
        help="Memory of the GPU that is in use, by any program.",
        read=_gpu(lambda gpu: gpu.memory_used_bytes),
        optional=True,
    ),
    Family(
        name="nimble_jobs_gpu_memory_total_bytes",
        kind=Kind.GAUGE,
        labels=_GPU,
        help="Memory of the GPU.",
        read=_gpu(lambda gpu: gpu.memory_total_bytes),
        optional=True,
    ),
    Family(
        name="nimble_jobs_gpu_temperature_celsius",
        kind=Kind.GAUGE,
        labels=_GPU,
        help="Temperature of the GPU.",
        read=_gpu(lambda gpu: gpu.temperature_celsius),
        optional=True,
    ),
    Family(
        name="nimble_jobs_gpu_power_watts",
        kind=Kind.GAUGE,
        labels=_GPU,
        help="Power that the GPU draws.",
        read=_gpu(lambda gpu: gpu.power_watts),
        optional=True,
    ),
    Family(
        name="nimble_jobs_gpu_read_errors",
        kind=Kind.GAUGE,
        help="GPU figures that the driver failed to give when these metrics were read.",
        read=lambda sight: [] if sight.gpu_errors is None else [((), sight.gpu_errors)],
        optional=True,
    ),
)

_SELF = (
    Family(
        name="nimble_jobs",
        kind=Kind.INFO,
        labels=("version",),
        help="The version of nimble-jobs that wrote these metrics.",
        read=lambda _sight: [((__version__,), 1)],
    ),
    Family(
        name="nimble_jobs_scrape_duration_seconds",
        kind=Kind.GAUGE,
        help="How long it took to read the store and the GPUs for these metrics.",
        read=lambda sight: [((), sight.took_s)],
    ),
)

FAMILIES = (*_WORKERS, *_GPUS, *_SELF)
