"""The listing of a folder of pictures, which the member that claimed a job leaves for the job's other members.

It lies beside the sheets. Its first line is JSON: the folder, how many files, how many bytes their names take, and the
SHA-256 of all that follows, which are the names, with a zero byte between two, and the stamps as int64.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from nimble_jobs.data.stamps import Names, Stamps
from nimble_jobs.regular import read_regular

LISTING = "listing"
_VERSION = 1


def to_bytes(stamps: Stamps) -> bytes:
    names, facts = stamps.names.blob, stamps.facts.astype("<i8", copy=False).tobytes()
    head = {
        "version": _VERSION,
        "root": str(stamps.root),
        "files": len(stamps),
        "names": len(names),
        "sha256": hashlib.sha256(names + facts).hexdigest(),
    }
    return b"".join((json.dumps(head).encode(), b"\n", names, facts))


def from_bytes(data: bytes) -> Stamps:
    """Raises ValueError, KeyError, TypeError for anything that `to_bytes` did not make."""
    line, _, rest = data.partition(b"\n")
    head = json.loads(line)
    if head["version"] != _VERSION or head["sha256"] != hashlib.sha256(rest).hexdigest():
        raise ValueError("another format, or its bytes differ from what was written")
    names = Names.of_blob(rest[: head["names"]], head["files"])
    facts = np.frombuffer(rest, dtype="<i8", offset=head["names"]).astype(np.int64).reshape(head["files"], 3)
    return Stamps(Path(head["root"]), names, facts)


def read_listing(sheets: Path) -> Stamps | None:
    """The listing in a folder of sheets; None if there is none, or if a power failure damaged it."""
    try:
        return from_bytes(read_regular(sheets / LISTING))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
