"""One batch through a loaded model, as a job sends it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nimble_jobs.planner import Loaded


def outputs_of(loaded: Loaded, x: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """What it gives for a batch of the host, by name; valid until the next call."""
    loaded.arrivals.begin()
    (landed,) = loaded.run([(loaded.arrivals.upload(x), None)])
    return landed.outputs
