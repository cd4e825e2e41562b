"""Schedules that differ in their bucket of texts only, told from the parts of their keys."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from nimble_jobs.argument_paths import PART

_MASK = PART + "attention_mask"


def bucket_of(parts: Mapping[str, str]) -> int | None:
    """The tokens of a row of a batch of texts; None for other inputs."""
    kind, _, rest = parts.get(_MASK, "").partition("[")
    length = rest.partition("]")[0]
    return int(length) if kind == "mask_right" and length.isdecimal() else None


def rows_of(parts: Mapping[str, str]) -> int | None:
    """The records of a batch of texts; None for other inputs."""
    rows = parts.get("input", "").partition("]")[0].removeprefix("[")
    return int(rows) if bucket_of(parts) is not None and rows.isdecimal() else None


def batch_words(parts: Mapping[str, str]) -> str:
    """A batch of texts: `512×32 tokens`, for 512 of up to 32 tokens."""
    return f"{rows_of(parts)}×{bucket_of(parts)} tokens"


def family_of(parts: Mapping[str, str]) -> str | None:
    """What schedules of the same model have in common that differ in their bucket of texts only; None for others."""
    length = bucket_of(parts)
    if length is None:
        return None
    common = sorted(
        (name, text.replace(f"[{length}]", "[]") if name.startswith(PART) else text)
        for name, text in parts.items()
        if name != "input"
    )
    return hashlib.sha256(repr(common).encode()).hexdigest()[:12]
