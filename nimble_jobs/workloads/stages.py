"""Measures how busy the stages of a running job are, and keeps the figures with its timings."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from nimble_jobs.engine.device import able
from nimble_jobs.engine.flight import Landed
from nimble_jobs.pipeline import Meter, bottleneck
from nimble_jobs.workloads.context import JobContext
from nimble_jobs.workloads.decoding import THREADS

_APART_S = 1.0  # between two reports


class Stages:
    """The meters of one job."""

    def __init__(
        self,
        context: JobContext,
        *,
        alone: bool,
        in_flight: int = 1,
        decodes: bool = False,
        texts: bool = False,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._now = now
        self.alone = alone  # a single batch, for which a thread costs more than it saves
        self._next_at = now() + _APART_S
        on_device = able(torch.device(context.device)).streams
        self.read = Meter("read" if decodes or texts else "read and decode", now=now)
        self.tokenise = Meter("tokenise", now=now)
        self.decode = Meter("decode", workers=THREADS, now=now)
        self.upload = Meter("upload", unit="copy engine", now=now)
        self.replay = Meter("replay", workers=in_flight, unit="replay in flight", now=now)
        self.download = Meter("download", unit="copy engine", now=now)
        self.columns = Meter("columns", now=now)
        self.cuts = Meter("cuts", now=now)
        self.shards = Meter("shards", now=now)
        self.waits = Meter("waits", now=now)  # of the job's thread for other stages; not a stage itself
        here = [
            (self.read, True),
            (self.tokenise, texts),
            (self.decode, decodes),
            (self.upload, on_device and not decodes),
        ]
        here += [(self.replay, True), (self.download, on_device), (self.columns, True)]
        here += [(self.cuts, texts), (self.shards, True)]
        self._meters = [meter for meter, is_here in here if is_here]

    def landed(self, landed: Landed[Any]) -> None:
        """Count the device's work on a batch."""
        if not landed.replay_s:
            return
        self.replay.worked(landed.replay_s)
        self.upload.worked(landed.upload_s)
        self.download.worked(landed.download_s)

    def due(self) -> dict[str, Any] | None:
        """The figures, if it is time to report them; None most of the time."""
        if self.alone or self._now() < self._next_at:
            return None
        self._next_at = self._now() + _APART_S
        return self.summary()

    def summary(self) -> dict[str, Any]:
        """`summary_of` all meters; empty for a single batch."""
        return {} if self.alone else summary_of(self._meters)


def summary_of(meters: Sequence[Meter]) -> dict[str, Any]:
    """`stages`: each with its name, busy share, workers, mean queue depth and limit; `bottleneck`: the name of the
    busiest.
    """
    loads = [meter.load() for meter in meters]
    busiest = bottleneck(loads)
    assert busiest is not None
    stages = [asdict(load) | {"busy": round(load.busy, 3), "depth": round(load.depth, 2)} for load in loads]
    return {"stages": stages, "bottleneck": busiest.name}
