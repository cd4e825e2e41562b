"""Candidates that were measured, with what it takes to capture them again, and table rows for those left out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nimble_jobs.engine.device import synchronize
from nimble_jobs.errors import CheckFailed, DeviceFault, EngineError, OutOfMemory, first_line
from nimble_jobs.planner.search.target import PlannedProgram, Programs
from nimble_jobs.planner.sources.source import Source
from nimble_jobs.schedule import Candidate

PAYS = 0.98  # more streams must come out below this share of fewer
CROWDED_STREAMS, _CROWDED = 4, 1.5  # from so many streams on, and so many times the critical path, the device is full
_MOST = 0.99  # share of the memory, above which a candidate is as costly as at it


@dataclass(frozen=True, kw_only=True)
class MeasuredCandidate:
    """A candidate that was captured and timed, and what it takes to capture it again."""

    row: Candidate  # in the table of candidates
    source: Source
    programs: Programs
    error: float | None
    failure: str | None = None  # why it must not be used: it disagrees with eager
    in_flight: int = 1
    available_bytes: int | None = None  # device memory that it may use; None: memory does not count

    @property
    def only(self) -> PlannedProgram:
        """The program, if the target has only one."""
        (planned,) = self.programs.values()
        return planned

    @property
    def crowded(self) -> bool:
        """Whether so many tasks run side by side that the device's width decides, not the critical path."""
        return self.fills(_CROWDED)

    def fills(self, times: float) -> bool:
        """Whether it takes more than so many times its critical path, on many streams."""
        return self.over_path > times and self.only.facts.streams >= CROWDED_STREAMS

    @property
    def over_path(self) -> float:
        """How many times as long as its critical path it takes; 0 if that is not known, or it has several programs."""
        path_us = self.only.facts.critical_path_us if len(self.programs) == 1 else None
        return self.replay_us / path_us if path_us else 0.0

    @property
    def replay_us(self) -> float:
        assert self.row.replay_us is not None
        return self.row.replay_us

    @property
    def cost(self) -> float:
        """What the search minimises: see `cost`, for one record."""
        assert self.row.records_per_s is not None
        return cost(1e6 / self.row.records_per_s, self.row.peak_bytes, self.available_bytes)


def cost(us: float, peak_bytes: int | None, available_bytes: int | None) -> float:
    """Time over the share of the available memory that is left: where memory is plenty, time decides."""
    if not available_bytes:
        return us
    return us / (1 - min((peak_bytes or 0) / available_bytes, _MOST))


def over_limit(nbytes: int, limit: int | None) -> str | None:
    """Why a candidate that takes so much memory must not be used; None if it may."""
    return None if limit is None or nbytes <= limit else f"needs {nbytes} bytes, more than the {limit} that it may use"


def measured_row(
    name: str, replay_us: float, records: int, nbytes: int, *, error: float | None, reason: str, streams: int
) -> Candidate:
    """A candidate that was measured: the time of a replay of `records`. `reason`: why it must not be used, or empty."""
    return Candidate(
        name=name,
        replay_us=replay_us,
        records_per_s=records / replay_us * 1e6,
        peak_bytes=nbytes,
        error=error,
        chosen=False,
        reason=reason,
        streams=streams,
    )


def left_out(name: str, reason: str, *, error: float | None = None, streams: int | None = None) -> Candidate:
    """A candidate that was not measured, and why."""
    return Candidate(
        name=name,
        replay_us=None,
        records_per_s=None,
        peak_bytes=None,
        error=error,
        chosen=False,
        reason=reason,
        streams=streams,
    )


def failed(name: str, error: Exception, device: torch.device, *, streams: int | None = None) -> Candidate:
    """The row of a candidate that raised. Whatever it raised, others may work: models rely on details of their own.

    Raises DeviceFault if the device no longer responds, for then no other candidate can work.
    """
    if isinstance(error, DeviceFault):
        raise error
    try:
        synchronize(device)
    except RuntimeError as e:
        raise DeviceFault(f"{name}: {first_line(error)}; the device no longer responds: {e}") from error
    match error:
        case CheckFailed():
            return left_out(name, str(error), error=error.error, streams=streams)
        case OutOfMemory() | torch.OutOfMemoryError():
            return left_out(name, "not built: not enough memory on the device", streams=streams)
        case EngineError():
            return left_out(name, f"not built: {error}", streams=streams)
        case _:
            return left_out(name, f"not built: {first_line(error)}", streams=streams)
