"""The bad records of a job, by what was wrong with them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nimble_jobs.dashboard.reads.lines import objects

_KINDS = 50
_BYTES = 4 << 20  # of the file that are looked at
_LONGEST = 500  # characters of a reason or an example
_PARTICULAR = re.compile(r"'[^']*'|\"[^\"]*\"|(?:/[^\s:;,]+)+|\d+(?:\.\d+)?")


def by_kind(path: Path | None) -> dict[str, Any]:
    """`{"kinds": [{"error", "count", "example"}], "looked_at", "whole"}`, the most frequent first.

    Reasons that differ in numbers, quoted words and paths only are one kind. `whole`: all records were looked at.
    """
    if path is None:
        return {"kinds": [], "looked_at": 0, "whole": True}
    counts, examples, names = _counted(objects(path, most_bytes=_BYTES))
    kinds = [
        {"error": names[kind], "count": number, "example": examples[kind]}
        for kind, number in counts.most_common(_KINDS)
    ]
    try:
        whole = path.stat().st_size <= _BYTES
    except OSError:
        whole = True
    return {"kinds": kinds, "looked_at": sum(counts.values()), "whole": whole}


def _counted(rows: Iterable[Mapping[str, Any]]) -> tuple[Counter[str], dict[str, str], dict[str, str]]:
    """Counts by kind; for each kind an example's id, and its reason."""
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    names: dict[str, str] = {}
    for row in rows:
        reason = str(row.get("reason", ""))[:_LONGEST]
        kind = _PARTICULAR.sub("…", reason)
        counts[kind] += 1
        examples.setdefault(kind, str(row.get("id", ""))[:_LONGEST])
        names.setdefault(kind, reason)
    return counts, examples, names
