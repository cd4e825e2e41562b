"""What one finished shard holds, as its sheet says."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from nimble_jobs.data.publish import FileEntry
from nimble_jobs.data.records import BadRecord, NotFinite, ShardCounts
from nimble_jobs.data.writers import Form, check_form


@dataclass(frozen=True, kw_only=True)
class Shard(ShardCounts):
    """The sheet of one finished shard."""

    index: int
    basis: str
    records: int
    files: tuple[FileEntry, ...]
    bad: tuple[BadRecord, ...]
    carries: str | None = None  # state that the model carries to the next shard
    decoded_by: str | None = None  # decoder of its pictures
    forms: Mapping[str, Form] = field(default_factory=dict)  # of the values of each field

    def to_bytes(self) -> bytes:
        nested = {
            "files": [vars(f) for f in self.files],
            "bad": [dataclasses.asdict(b) for b in self.bad],
            "not_finite": {name: vars(some) for name, some in self.not_finite.items()},
        }
        body = json.dumps({**vars(self), **nested}, sort_keys=True)
        return f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}\n".encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Shard:
        """Parse a sheet. Raises ValueError if its bytes are damaged."""
        digest, _, body = data.decode().partition("\n")
        body = body.removesuffix("\n")
        if hashlib.sha256(body.encode()).hexdigest() != digest:
            raise ValueError("its bytes differ from what was written")
        raw = json.loads(body)
        files = tuple(FileEntry(**f) for f in raw.pop("files"))
        bad = tuple(BadRecord(**b) for b in raw.pop("bad"))
        not_finite = {name: NotFinite(**some) for name, some in raw.pop("not_finite", {}).items()}
        forms = {name: (kind, tuple(shape)) for name, (kind, shape) in raw.pop("forms", {}).items()}
        return cls(**raw, files=files, bad=bad, not_finite=not_finite, forms=forms)


def forms_of(shards: Mapping[int, Shard]) -> dict[str, tuple[Form, str]]:
    """The forms of the values of each field in all of these shards, each with whose it is.

    Raises ModelError if two shards differ in one, which several attempts or devices must have made.
    """
    found: dict[str, tuple[Form, str]] = {}
    for index, shard in sorted(shards.items()):
        for name, form in shard.forms.items():
            known, whose = found.setdefault(name, (form, f"shard {index}, which another attempt or device wrote"))
            check_form(name, form, known, f"shard {index}", whose)
    return found
