"""What workers need wherever a batch system starts them, and the command that starts one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nimble_jobs.clusters.values import whole
from nimble_jobs.errors import UsageError
from nimble_jobs.spec.units import format_bytes, format_duration

_LAST_S = 30.0  # beyond the grace period: the last writes, and the end of the child processes
_MOST_S = 365 * 86400.0
_LEAST_BYTES = 1 << 30
SHARED_CACHE = "NIMBLE_JOBS_CACHE_SHARED"  # variable of the setting cache.shared


@dataclass(frozen=True, kw_only=True)
class BurstWorkers:
    """Equal workers that end by themselves. Raises UsageError naming the option that is out of range."""

    count: int
    gpus: int  # of each worker; 0: it works on the CPU
    cpus: int  # of each worker
    memory_bytes: int  # of each worker's host
    time_s: float  # how long the batch system lets one run
    max_idle_s: float  # how long one waits for work
    grace_s: float  # how long a job may take to reach a safe point

    def __post_init__(self) -> None:
        whole("--count", self.count, 1, 10_000)
        whole("--gpus", self.gpus, 0, 64)
        whole("--cpus", self.cpus, 1, 4096)
        if self.memory_bytes < _LEAST_BYTES:
            found = format_bytes(self.memory_bytes)
            raise UsageError(f"--memory: found {found}; expected at least {format_bytes(_LEAST_BYTES)} for torch alone")
        if not 60.0 <= self.time_s <= _MOST_S:
            raise UsageError(f"--time: found {format_duration(self.time_s)}; expected a time between 1m and 365d")

    @property
    def stop_s(self) -> int:
        """Seconds from SIGTERM until a worker is gone."""
        return math.ceil(self.grace_s + _LAST_S)

    def command(self, max_time_s: float) -> list[str]:
        """The words after `nimble-jobs` that start one worker on all devices that the batch system gave it."""
        devices = ["--devices", "all"] if self.gpus else ["--device", "cpu"]
        times = ["--max-idle", format_duration(self.max_idle_s), "--max-time", format_duration(max_time_s)]
        return ["worker", "start", *devices, *times]

    @property
    def memory_mib(self) -> int:
        """Rounded up."""
        return math.ceil(self.memory_bytes / (1 << 20))
