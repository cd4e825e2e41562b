"""What all tests share."""

from __future__ import annotations

import os

# OpenMP's threads spin while they wait. With more busy processes than cores, as in a parallel test run, they keep each
# other from working: a training step then takes twenty times as long. Set before torch loads, and inherited by the
# processes that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
