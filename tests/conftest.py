"""What all tests share."""

from __future__ import annotations

import os

# OpenMP's threads spin while they wait. With more busy processes than cores, as in a parallel test run, they keep each
# other from working: a training step then takes twenty times as long. Set before torch loads, and inherited by the
# processes that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Searches time their candidates for half a second each. No test is about these figures, so one sample of each will do.
os.environ.setdefault("NIMBLE_JOBS_TIMING_BUDGET_S", "0.01")

# Python would compile torch's source anew in each of the many processes that tests start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
