"""For jobs that score only new files: the files of an input and how a job treats each, as frozen values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

VANISHED = "vanished after it was listed"
CHANGED = "changed after it was listed"
UNSCORED = "its shard failed again and again"


class Kind(StrEnum):
    """How a job treats a listed file."""

    NEW = "new"  # no earlier run scored it
    CHANGED = "changed"  # an earlier run scored it with another size or time; scored again
    AGAIN = "again"  # scored again because the model has changed
    SKIPPED = "skipped"  # scored earlier
    IGNORED = "ignored"  # changed, but `changed: ignore` is set; not scored
    SETTLING = "settling"  # written too recently; the next run scores it
    ELSEWHERE = "elsewhere"  # taken by another job of this name that has not ended
    UNUSABLE = "unusable"  # a broken link, a pipe or the like

    @property
    def wanted(self) -> bool:
        """Whether the job scores it."""
        return self in (Kind.NEW, Kind.CHANGED, Kind.AGAIN)


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """One file as it was when it was listed."""

    path: str  # relative to the source's folder, with /
    size: int  # bytes; -1 if it is not a readable file
    mtime_ns: int
    inode: int = 0
    ctime_ns: int = 0

    @property
    def version(self) -> tuple[int, int]:
        """Size and time, which change when the file is written to."""
        return self.size, self.mtime_ns


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Numbers of files. `new` to `unusable` add up to `listed`; `vanished`, `moved` and `failed` are among the wanted
    ones.
    """

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
    moved: int = 0  # written to after it was listed; the next run scores it
    failed: int = 0  # in a shard that failed for good, which tells nothing of the file; the next run scores it

    @property
    def wanted(self) -> int:
        """Files on the job's list."""
        return self.new + self.changed + self.again

    def to_json(self) -> dict[str, int]:
        """A mapping from names to numbers."""
        return dataclasses.asdict(self)

    def words(self) -> str:
        """All numbers that are not zero: `12 new, 3 changed, 1,204 skipped`."""
        said = [f"{n:,} {name}" for name, n in self.to_json().items() if n and name != "listed"]
        return ", ".join(said) or "no files"


@dataclass(frozen=True, kw_only=True)
class FileList:
    """The files that a job scores. Its first attempt decides which."""

    root: str  # the source's folder, links resolved
    listed_at: float  # Unix seconds
    after_run: int  # number of the newest run of this folder at that time; 0: none
    counts: Counts
    files: Sequence[InputFile]  # sorted by path, each one `wanted`


@dataclass(frozen=True, kw_only=True)
class Scored:
    """The files to mark as seen when a job succeeds."""

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
    """How a job that uses `model` treats a listed file. For `changed: fail` this returns CHANGED and the caller fails.

    The age of a file dated in the future counts from its inode's last change, so that a wrong clock on another machine
    does not make it wait for ever.
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
