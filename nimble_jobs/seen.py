"""Files of an input and what a job makes of them, as frozen values: for jobs that score only what is new."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

VANISHED = "vanished after it was listed"
CHANGED = "changed after it was listed"


class Kind(StrEnum):
    """What a listed file is to a job."""

    NEW = "new"  # no earlier run scored it
    CHANGED = "changed"  # an earlier run did, but its size or time was another; scored again
    AGAIN = "again"  # scored again because the model has changed
    SKIPPED = "skipped"  # scored earlier
    IGNORED = "ignored"  # as CHANGED, under `changed: ignore`; not scored
    SETTLING = "settling"  # written so recently that it waits for the next run
    ELSEWHERE = "elsewhere"  # already taken by another job of this name, which has not ended
    UNUSABLE = "unusable"  # a link to nothing, a pipe and the like

    @property
    def wanted(self) -> bool:
        """Does the job score it?"""
        return self in (Kind.NEW, Kind.CHANGED, Kind.AGAIN)


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """One file as it was when it was listed."""

    path: str  # below the source's folder, with /
    size: int  # bytes; -1 for what is no readable file
    mtime_ns: int
    inode: int = 0
    ctime_ns: int = 0

    @property
    def version(self) -> tuple[int, int]:
        """Equal only as long as nobody wrote to it, as far as size and time tell."""
        return self.size, self.mtime_ns


@dataclass(frozen=True, kw_only=True)
class Counts:
    """How many files were what. The first eight add up to `listed`; the last two are among those that were wanted."""

    listed: int = 0
    new: int = 0
    changed: int = 0
    again: int = 0
    skipped: int = 0
    ignored: int = 0
    settling: int = 0
    elsewhere: int = 0
    unusable: int = 0
    vanished: int = 0  # gone before it was read
    moved: int = 0  # written to between listing and the end of the job; the next run scores it

    @property
    def wanted(self) -> int:
        """Files on the job's list."""
        return self.new + self.changed + self.again

    def to_json(self) -> dict[str, int]:
        """As a mapping of names to numbers."""
        return dataclasses.asdict(self)

    def words(self) -> str:
        """`12 new, 3 changed, 1,204 skipped`: everything that is not zero."""
        said = [f"{n:,} {name}" for name, n in self.to_json().items() if n and name != "listed"]
        return ", ".join(said) or "no files"


@dataclass(frozen=True, kw_only=True)
class FileList:
    """The files that a job scores, fixed at its first attempt."""

    root: str  # the source's folder, links resolved
    listed_at: float  # Unix seconds
    after_run: int  # number of the newest run of this folder that was known then; 0: none was
    counts: Counts
    files: Sequence[InputFile]  # sorted by path, each one `wanted`


@dataclass(frozen=True, kw_only=True)
class Scored:
    """What becomes seen with a job's success."""

    root: str  # the source's folder
    model: str  # identity of the model that scored, SHA-256 in hex
    listed_at: float  # Unix seconds
    after_run: int  # as in the list
    files: Sequence[InputFile]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A file that a successful run has scored."""

    root: str
    path: str
    size: int
    mtime_ns: int
    model: str
    job: str  # id of the job that scored it
    at: float  # when that job succeeded, Unix seconds


def kind_of(
    file: InputFile,
    seen: Seen | None,
    *,
    model: str,
    settle_s: float,
    changed: str,
    model_change: str,
    now: float,
) -> Kind:
    """What a listed file is to a job that uses `model`. `changed: fail` is the caller's: it gets CHANGED.

    A file with a time in the future is as old as its last change of any kind, so that a wrong clock elsewhere does not
    keep it waiting for ever.
    """
    if file.size < 0:
        return Kind.UNUSABLE
    if seen is not None and file.version == (seen.size, seen.mtime_ns):
        again = model_change == "all" and seen.model != model
        return Kind.AGAIN if again else Kind.SKIPPED
    written_at = file.mtime_ns / 1e9
    if written_at > now:
        written_at = file.ctime_ns / 1e9
    if now - written_at < settle_s:
        return Kind.SETTLING
    if seen is None:
        return Kind.NEW
    if changed == "ignore":
        return Kind.AGAIN if model_change == "all" and seen.model != model else Kind.IGNORED
    return Kind.CHANGED
