"""Names of jobs: short, sortable by time, easy to read aloud."""

from __future__ import annotations

import re
import secrets

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's: no i, l, o, u
LENGTH = 12
_EPOCH_S = 1704067200  # 2024-01-01; 40 bits of milliseconds last until 2058
MIN_PREFIX = 4  # shortest prefix of an id that is accepted
_START = re.compile(f"[{ALPHABET}]{{1,{MIN_PREFIX - 1}}}")
_PREFIX = re.compile(f"[{ALPHABET}]{{{MIN_PREFIX},{LENGTH}}}")


def new_id(now: float) -> str:
    """40 bits of milliseconds, then 20 random bits, in base 32. `now` in Unix seconds."""
    return _base32(((round((now - _EPOCH_S) * 1000) & (2**40 - 1)) << 20) | secrets.randbits(20), LENGTH)


def random_id(length: int) -> str:
    """Random characters of the same alphabet."""
    return _base32(secrets.randbits(5 * length), length)


def is_id(text: str) -> bool:
    """Whether this has the form of an id."""
    return len(text) == LENGTH and is_prefix(text)


def is_prefix(text: str) -> bool:
    """Whether this could be an id, or a prefix of one with at least four characters."""
    return _PREFIX.fullmatch(text) is not None


def is_start(text: str) -> bool:
    """Whether this could be a prefix of an id, but is too short to be accepted."""
    return _START.fullmatch(text) is not None


def _base32(number: int, length: int) -> str:
    return "".join(ALPHABET[(number >> 5 * i) & 31] for i in reversed(range(length)))
