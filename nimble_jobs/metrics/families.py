"""Every metric family. `docs/metrics.md` has a table of them, which a test compares with this.

Counters come from totals in the store, which begin at zero when it is made, or first opened by a version that has them.
Pruning, retries and removed schedules never lower them.
"""

from __future__ import annotations

from nimble_jobs.metrics import devices, work
from nimble_jobs.metrics.family import Family, Kind

FAMILIES: tuple[Family, ...] = (*work.FAMILIES, *devices.FAMILIES)

__all__ = ["FAMILIES", "Family", "Kind"]
