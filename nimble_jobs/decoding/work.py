"""A piece of work for a process or thread, which is a few pictures, and its answer.

Both are tables with a row for each picture: an object and a piece of JSON for each would keep the process that sends
them from its other threads' work.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from nimble_jobs.chance import RandomCrops
from nimble_jobs.decoding.recipe import Recipe

GOOD, BAD, CHANGED, VANISHED = range(4)  # what became of a picture
COLUMNS = 5  # of an answer; see `Row`
STATUS, LENGTH, HEIGHT, WIDTH, ALIKE = range(COLUMNS)


@dataclass(frozen=True, kw_only=True, eq=False)
class Files:
    """Files as they were listed."""

    before: str  # the common beginning of all paths
    names: bytes  # the rest of each path, as the file system has it, separated by zero bytes
    facts: np.ndarray  # int64 [n, 3]: size, time of change in ns, inode. Size < 0: it could not be looked at

    def __len__(self) -> int:
        return len(self.facts)

    @property
    def paths(self) -> list[str]:
        return [self.before + name for name in os.fsdecode(self.names).split("\0")] if len(self) else []

    def part(self, start: int, stop: int) -> Files:
        """The files from `start` to `stop`."""
        return replace(self, names=b"\0".join(self.names.split(b"\0")[start:stop]), facts=self.facts[start:stop])


@dataclass(frozen=True, kw_only=True, eq=False)
class Work:
    """Some pictures of one input. With `encoded`, plain JPEGs are left for a device to decode."""

    recipe: Recipe
    places: np.ndarray  # int64 [n, 2]: where the result goes, and the room there, at least that of its pixels; bytes
    files: Files | None = None  # None: the pictures' bytes come along
    encoded: bool = False
    crops: RandomCrops | None = None  # random parts of the pictures, resized to the recipe's size
    indexes: np.ndarray | None = None  # int64 [n]: positions in the input, which the random parts depend on

    def __len__(self) -> int:
        return len(self.places)

    def part(self, start: int, stop: int) -> Work:
        """The pictures from `start` to `stop`."""
        return replace(
            self,
            places=self.places[start:stop],
            files=None if self.files is None else self.files.part(start, stop),
            indexes=None if self.indexes is None else self.indexes[start:stop],
        )

    def moved(self, nbytes: int) -> Work:
        """The same work, with results `nbytes` further on in memory."""
        return replace(self, places=self.places + np.array((nbytes, 0)))

    def packed(self) -> tuple[dict[str, Any], list[bytes]]:
        """This as JSON-able values and as bytes."""
        message: dict[str, Any] = {"recipe": asdict(self.recipe), "encoded": self.encoded}
        blobs = [self.places.tobytes()]
        if self.files is not None:
            message["before"] = self.files.before
            blobs += [self.files.names, self.files.facts.tobytes()]
        if self.crops is not None:
            assert self.indexes is not None
            message["crops"] = asdict(self.crops)
            blobs.append(self.indexes.tobytes())
        return message | {"packed": len(blobs)}, blobs

    @classmethod
    def unpacked(cls, message: dict[str, Any], blobs: Sequence[bytes]) -> Work:
        """What `packed` gave."""
        left = iter(blobs)
        places = _table(next(left), 2)
        files = None
        if "before" in message:
            before, names = message["before"], next(left)
            files = Files(before=before, names=names, facts=_table(next(left), 3))
        crops = RandomCrops(**_with_tuples(message["crops"])) if "crops" in message else None
        return cls(
            recipe=Recipe(**_with_tuples(message["recipe"])),
            places=places,
            files=files,
            encoded=message["encoded"],
            crops=crops,
            indexes=None if crops is None else _table(next(left), 1).reshape(-1),
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result for one picture. A good picture's bytes start at its place in memory."""

    status: int
    reason: str = ""
    length: int = 0  # bytes of the result
    height: int = 0  # of what lies there, in pixels
    width: int = 0
    alike: int = 0  # for a file: `jpeg.alike` of its header, not 0. 0: what lies there are pixels


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """The results for all pictures of a piece of work."""

    rows: np.ndarray  # int64 [n, COLUMNS]
    reasons: dict[int, str]  # why pictures are bad, by row
    busy_s: float

    @classmethod
    def of(cls, rows: Sequence[Row], busy_s: float) -> Answer:
        """The answer with these rows."""
        table = [(row.status, row.length, row.height, row.width, row.alike) for row in rows]
        return cls(
            rows=np.array(table, dtype=np.int64).reshape(-1, COLUMNS),
            reasons={i: row.reason for i, row in enumerate(rows) if row.reason},
            busy_s=busy_s,
        )

    @classmethod
    def joined(cls, answers: Sequence[Answer]) -> Answer:
        """One answer from the answers to consecutive pieces of work."""
        starts = np.cumsum([0, *(len(answer.rows) for answer in answers)]).tolist()
        return cls(
            rows=np.concatenate([answer.rows for answer in answers]),
            reasons={start + i: why for start, a in zip(starts, answers, strict=False) for i, why in a.reasons.items()},
            busy_s=sum(answer.busy_s for answer in answers),
        )

    def packed(self) -> tuple[dict[str, Any], list[bytes]]:
        """This as JSON-able values and as bytes."""
        return {"reasons": list(self.reasons.items()), "busy_s": self.busy_s}, [self.rows.tobytes()]

    @classmethod
    def unpacked(cls, message: dict[str, Any], blobs: Sequence[bytes]) -> Answer:
        """What `packed` gave."""
        reasons = {int(i): str(why) for i, why in message["reasons"]}
        return cls(rows=_table(blobs[0], COLUMNS), reasons=reasons, busy_s=message["busy_s"])


def signed(inode: int) -> int:
    """An inode's number as int64. File systems may use all of its bits."""
    return inode - (1 << 64) if inode >= 1 << 63 else inode


def _table(data: bytes, columns: int) -> np.ndarray:
    return np.frombuffer(data, dtype=np.int64).reshape(-1, columns)


def _with_tuples(found: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
