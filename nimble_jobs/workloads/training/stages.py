"""How busy the stages of a training are: those that feed it, and the steps themselves."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from nimble_jobs.pipeline import Meter
from nimble_jobs.workloads.stages import summary_of


class Stages:
    """The meters of one training, over all its epochs and validations."""

    def __init__(self, device: str, *, decodes: bool = False, now: Callable[[], float] = time.perf_counter) -> None:
        """`decodes`: the device decodes pictures."""
        on_device = device.startswith("cuda")
        self.read = Meter("read" if decodes else "read and decode", now=now)
        self.decode = Meter("decode", now=now)
        self.prepare = Meter("upload" if on_device and not decodes else "augment", now=now)
        self.steps = Meter("step", unit="device" if on_device else "host", now=now)
        self._meters = [self.read, *([self.decode] if decodes else []), self.prepare, self.steps]

    def summary(self) -> dict[str, Any]:
        """What `summary_of` says of them."""
        return summary_of(self._meters)
