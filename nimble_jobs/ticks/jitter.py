"""Delays each tick a little, so that timers with the same expression do not all start at once."""

from __future__ import annotations

import hashlib


def jitter_s(name: str, tick: int, width_s: float) -> float:
    """A delay in [0, width_s), in seconds. It depends on the timer's name and the tick alone, on every machine."""
    drawn = int.from_bytes(hashlib.sha256(f"{name}\0{tick}".encode()).digest()[:6], "big")
    return drawn / 2**48 * width_s
