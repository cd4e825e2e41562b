"""How far a tick is moved, so that timers of one expression do not all start at once."""

from __future__ import annotations

import hashlib


def jitter_s(name: str, tick: int, width_s: float) -> float:
    """Seconds from 0 to below `width_s`, the same for a timer's name and tick (UTC seconds) on every machine."""
    drawn = int.from_bytes(hashlib.sha256(f"{name}\0{tick}".encode()).digest()[:6], "big")
    return drawn / 2**48 * width_s
