"""The seed of tests that kill and disturb processes at random."""

from __future__ import annotations

import os
import random

from tests import prefork

_USUAL = 20261124


def seed() -> int:
    """NIMBLE_JOBS_KILL_SEED; without it another one in each run with `--all`, and otherwise always the same."""
    given = int(os.environ.get("NIMBLE_JOBS_KILL_SEED", "0"))
    return given or (random.SystemRandom().randrange(1, 1 << 30) if os.environ.get(prefork.COLD) else _USUAL)
