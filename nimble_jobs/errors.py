"""The one error root. A class's docstring is its default message; `exit_code` is what the command line returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


class NimbleError(Exception):
    """nimble-jobs could not do what was asked."""

    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False  # may another attempt of the same job succeed?
    ends_process: bool = False  # must the process that met it run no other job?

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (self.__doc__ or "").strip())


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing wrong with a spec, printed as `FILE:LINE: FIELD: problem; expected ...`."""

    file: str
    line: int  # 1-based; 0 if no line applies (a command-line override)
    field: str  # dotted path, "" for the document as a whole
    problem: str
    expected: str = ""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        text = f"{where}: {self.field}: {self.problem}" if self.field else f"{where}: {self.problem}"
        return f"{text}; expected {self.expected}" if self.expected else text


class SpecError(NimbleError, ValueError):
    """The job spec is not valid."""

    exit_code = 2

    def __init__(self, problems: list[Problem] | tuple[Problem, ...]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(p) for p in self.problems))


class SettingsError(SpecError):
    """The configuration is not valid."""


class UsageError(NimbleError, ValueError):
    """The command was not used as it should be."""

    exit_code = 2


class NotFound(NimbleError, LookupError):
    """No such job, schedule or worker."""

    exit_code = 102


class JobFailed(NimbleError, RuntimeError):
    """The job failed."""

    exit_code = 100


class NotFinishedInTime(NimbleError, TimeoutError):
    """The job did not finish in time."""

    exit_code = 101


class JobCancelled(NimbleError):
    """The job was cancelled."""

    exit_code = 103


class ModelError(NimbleError, ValueError):
    """The model could not be built or its weights do not fit."""

    exit_code = 100


class ModelChanged(ModelError):
    """The model's code changed while this process ran it."""

    retryable = True
    ends_process = True


class DataError(NimbleError, ValueError):
    """The input could not be read."""

    exit_code = 100


class NoRecords(DataError):
    """A file holds no records, which matters only if no other file of the input holds any."""


class ShardsMissing(DataError):
    """Finished shards of other devices cannot be used, so they must be scored again."""

    retryable = True


class OutOfStep(DataError):
    """What the job's other devices began with has changed, or is gone."""

    retryable = True


class OutputExists(NimbleError, FileExistsError):
    """The output folder exists already."""

    exit_code = 100


class EngineError(NimbleError, RuntimeError):
    """The schedule could not be recorded, captured or replayed."""

    exit_code = 100


class CannotRecord(EngineError):
    """The model does something that a schedule cannot hold."""


class CaptureFailed(EngineError):
    """The device refuses to capture the schedule, whose trial run has ended."""


class PlanError(EngineError):
    """A plan breaks one of the rules that every plan must keep."""


class CheckFailed(EngineError):
    """A replay does not agree with eager execution."""

    def __init__(self, message: str | None = None, *, error: float | None = None) -> None:
        super().__init__(message)
        self.error = error  # relative norm; None if it is not finite


class NoJointReplay(CheckFailed):
    """A rank of a training cannot replay the step with the others, and all ranks know that."""


class OutOfMemory(EngineError, MemoryError):
    """The device has not enough free memory."""

    retryable = True


class DeviceFault(EngineError):
    """The device reported a fault; its context cannot be used any more."""

    retryable = True
    ends_process = True


class RankLost(NimbleError, RuntimeError):
    """A process of a training on several devices is gone, or no longer answers."""

    exit_code = 100
    retryable = True
    ends_process = True  # what the others wait for on the device may never come


class DevicesTaken(JobFailed):
    """Ranks of other jobs have devices that the job needs."""

    retryable = True


class StoreError(NimbleError, RuntimeError):
    """The state folder or its database cannot be used."""


class StoreTrouble(StoreError):
    """The state folder or its database cannot be used right now: it is full, locked, read-only, or away."""

    retryable = True


class StoreGone(StoreTrouble):
    """The state folder or its database is gone."""


class LeaseLost(StoreError):
    """The lease of this process's worker is over for good, so it must not write: another worker may have its job."""


class HomeReplaced(StoreError):
    """Another state folder has taken the place of the one that this process opened."""


class DiskTrouble(NimbleError, OSError):
    """A disk is full or reports errors."""

    exit_code = 100
    retryable = True


class ObjectTrouble(NimbleError, ConnectionError):
    """An object store does not answer right now."""

    exit_code = 100
    retryable = True


class StateFolderRefused(StoreError, PermissionError):
    """Other users can write to the state folder, or it belongs to another user."""


class Damaged(StoreError):
    """Stored bytes differ from what was written."""


class CheckpointGone(StoreError):
    """Something else removed a checkpoint that the training still needs."""

    retryable = True


class FencedOut(StoreError):
    """Another attempt owns the job now."""


def foreseen(error: BaseException) -> bool:
    """Whether the message alone is enough for its reader. Other errors also need their traceback."""
    unforeseen = isinstance(error, (EngineError, StoreError)) and not isinstance(error, OutOfMemory)
    return isinstance(error, NimbleError) and not unforeseen


def first_line(error: BaseException) -> str:
    """The error's type and the first line of its message."""
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
