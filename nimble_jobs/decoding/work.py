"""What a process or a thread is asked to do at a time, a few pictures, and what it answers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from nimble_jobs.chance import RandomCrops
from nimble_jobs.decoding.recipe import Recipe

GOOD, BAD, CHANGED, VANISHED = range(4)  # what became of a picture


@dataclass(frozen=True, kw_only=True)
class Item:
    """One picture: a file as it was listed, or bytes that come along."""

    offset: int  # where its result goes, in bytes
    room: int  # bytes for it, at least those of its pixels
    path: str | None = None  # None: bytes
    size: int = -1  # of the file or the bytes; negative: the file could not be looked at when it was listed
    mtime_ns: int = 0
    inode: int = 0
    index: int = 0  # position in the input, which random parts depend on


@dataclass(frozen=True, kw_only=True)
class Work:
    """Some pictures of one input. With `encoded`, plain JPEGs are left for a device to decode."""

    recipe: Recipe
    items: tuple[Item, ...]
    encoded: bool = False
    crops: RandomCrops | None = None  # random parts of the pictures, resized to the recipe's size

    def to_json(self) -> dict[str, Any]:
        """As JSON-able values."""
        crops = None if self.crops is None else asdict(self.crops)
        items = [[i.offset, i.room, i.path, i.size, i.mtime_ns, i.inode, i.index] for i in self.items]
        return {"recipe": asdict(self.recipe), "items": items, "encoded": self.encoded, "crops": crops}

    @classmethod
    def of_json(cls, found: dict[str, Any]) -> Work:
        """What `to_json` gave, also after a way through JSON."""
        return cls(
            recipe=Recipe(**_with_tuples(found["recipe"])),
            items=tuple(
                Item(offset=o, room=r, path=p, size=s, mtime_ns=m, inode=i, index=n)
                for o, r, p, s, m, i, n in found["items"]
            ),
            encoded=found["encoded"],
            crops=None if found["crops"] is None else RandomCrops(**_with_tuples(found["crops"])),
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """What became of one picture. A good one lies in the memory from its item's offset on."""

    status: int
    reason: str = ""
    length: int = 0  # bytes of the result
    height: int = 0  # of what lies there, in pixels
    width: int = 0
    decoded: bool = True  # pixels; else the file


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One row for each item."""

    rows: tuple[Row, ...]
    busy_s: float

    def to_json(self) -> dict[str, Any]:
        """As JSON-able values."""
        rows = [[r.status, r.reason, r.length, r.height, r.width, r.decoded] for r in self.rows]
        return {"rows": rows, "busy_s": self.busy_s}

    @classmethod
    def of_json(cls, found: dict[str, Any]) -> Answer:
        """What `to_json` gave, also after a way through JSON."""
        rows = tuple(
            Row(status=s, reason=why, length=n, height=h, width=w, decoded=d) for s, why, n, h, w, d in found["rows"]
        )
        return cls(rows=rows, busy_s=found["busy_s"])


def _with_tuples(found: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
