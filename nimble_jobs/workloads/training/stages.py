"""How busy the stages of a training are: those that feed it, and the steps themselves."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from nimble_jobs.pipeline import Meter, bottleneck
from nimble_jobs.workloads.stages import rounded


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
        """`stages`: each with its name, busy share, workers, mean queue depth and limit; `bottleneck`: the name of the
        busiest.
        """
        loads = [meter.load() for meter in self._meters]
        busiest = bottleneck(loads)
        assert busiest is not None
        return {"stages": [rounded(asdict(load)) for load in loads], "bottleneck": busiest.name}
