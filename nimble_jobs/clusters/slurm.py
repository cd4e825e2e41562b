"""The text of a Slurm job array whose tasks are workers.

Source: sbatch(1), in particular `--signal` (B: sends it to the batch shell; it may come up to 60 s early), `--requeue`
and `--array`; slurm.conf(5), `KillWait`.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from nimble_jobs.clusters.values import absolute, place, slurm_name
from nimble_jobs.clusters.workers import SHARED_CACHE, BurstWorkers
from nimble_jobs.errors import UsageError
from nimble_jobs.spec.units import format_duration

_MARGIN_S = 300.0  # a worker ends at least this long before the time limit
_LEAST_S = 60.0  # that is left for work


@dataclass(frozen=True, kw_only=True)
class SlurmArray:
    """One worker a task, each on one node. Raises UsageError naming the option that cannot be used."""

    workers: BurstWorkers
    program: tuple[str, ...]  # runs nimble-jobs on the nodes
    home: str  # state folder on the nodes, absolute
    own_disk: bool = False  # whether each node has such a folder of its own, so that jobs are in a shared database
    partition: str | None = None
    account: str | None = None
    shared_cache: str | None = None  # where workers share the files of schedules; needs `own_disk`

    def __post_init__(self) -> None:
        least_s = self.margin_s + _LEAST_S
        if self.workers.time_s < least_s:
            raise UsageError(
                f"--time: found {format_duration(self.workers.time_s)}; expected at least {format_duration(least_s)}, "
                f"because workers end {format_duration(self.margin_s)} before the limit"
            )
        absolute("--node-home" if self.own_disk else "--home", self.home)
        if self.shared_cache is not None:
            place("--shared-cache", self.shared_cache)
            if not self.own_disk:
                raise UsageError(
                    f"--shared-cache: found {self.shared_cache} without --node-home; expected both or neither, because "
                    "workers over one state folder share its schedules already"
                )
        for word in self.program:
            if not word.isprintable():
                raise UsageError(f"{word!r}: the path of this program has letters that a script cannot hold")
        for option, name in (("--partition", self.partition), ("--account", self.account)):
            if name is not None:
                slurm_name(option, name)

    @property
    def margin_s(self) -> float:
        """How long before the time limit workers end. The signal then finds none, unless one is late."""
        return max(_MARGIN_S, 2.0 * self.workers.stop_s)

    def text(self) -> str:
        """The script, for bash."""
        start = [*self.program, *self.workers.command(self.workers.time_s - self.margin_s)]
        lines = [
            "#!/bin/bash",
            "# A Slurm job array whose tasks are workers of nimble-jobs. Submit it with: sbatch FILE",
            "# An option of sbatch replaces a line here: `sbatch --array=1-20%4 FILE` starts 20 workers, 4 at a time.",
            *(f"#SBATCH --{option}" for option in self._options()),
            "",
            "set -euo pipefail",
            "",
            *([_DATABASE] if self.own_disk else []),
            f"export NIMBLE_JOBS_HOME={shlex.quote(self.home)}",
            f"export NIMBLE_JOBS_LIMITS_GRACE={format_duration(self.workers.grace_s)}",
            *([f"export {SHARED_CACHE}={shlex.quote(self.shared_cache)}"] if self.shared_cache is not None else []),
            "# The worker takes the shell's place, so that Slurm's SIGTERM reaches it.",
            f"exec {shlex.join(start)}",
        ]
        return "\n".join(lines) + "\n"

    def _options(self) -> list[str]:
        workers = self.workers
        return [
            "job-name=nimble-jobs",
            f"array=1-{workers.count}",
            *([f"partition={self.partition}"] if self.partition else []),
            *([f"account={self.account}"] if self.account else []),
            "nodes=1",
            "ntasks=1",
            *([f"gres=gpu:{workers.gpus}"] if workers.gpus else []),
            f"cpus-per-task={workers.cpus}",
            f"mem={workers.memory_mib}M",
            f"time={_time(workers.time_s)}",
            f"signal=B:TERM@{workers.stop_s}",
            "requeue",
            "open-mode=append",
            "output=nimble-jobs-%A_%a.log",
        ]


_DATABASE = ': "${NIMBLE_JOBS_DB:?expected the address of the PostgreSQL database in which the jobs are}"'


def _time(seconds: float) -> str:
    """DAYS-HH:MM:SS, rounded up."""
    minutes, second = divmod(-int(-seconds // 1), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}-{hour:02}:{minute:02}:{second:02}"
