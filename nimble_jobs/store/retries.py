"""The wait before a job's next attempt."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

_INITIAL_S, _MAX_S = 5.0, 600.0  # run.retry's defaults


def delay_s(job: str, spec: Mapping[str, Any], tries: int) -> float:
    """Seconds from a failed attempt, the `tries`-th, to the next one: anything from 0 to `longest_s`, evenly.

    Jobs that failed together, of one cause, so do not come back together ("full jitter"; M. Brooker, Exponential
    Backoff and Jitter, AWS Architecture Blog, 2015). The same job and try give the same delay.
    """
    digest = hashlib.sha256(f"{job} {tries}".encode()).digest()
    return longest_s(spec, tries) * (int.from_bytes(digest[:8]) / 2**64)


def longest_s(spec: Mapping[str, Any], tries: int) -> float:
    """The longest delay after the `tries`-th failed attempt, in seconds."""
    retry = (spec.get("run") or {}).get("retry") or {}
    initial, longest = float(retry.get("initial", _INITIAL_S)), float(retry.get("max", _MAX_S))
    factor = 2.0 ** min(tries - 1, 60) if retry.get("backoff", "exponential") == "exponential" else 1.0
    return min(initial * factor, longest)
