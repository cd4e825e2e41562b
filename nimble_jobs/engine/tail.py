"""Computes what a job needs from a model's outputs, on the device, by a small graph that runs after each replay.

The model's graph serves all jobs, but jobs need different results. A few launches from Python for each batch would take
the host longer than a small model computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from nimble_jobs.engine.capture import Instance
from nimble_jobs.engine.captures import UNCAPTURED, capturing
from nimble_jobs.errors import EngineError, first_line

Head = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]  # outputs -> what the job needs; hashable


class Tail:
    """Runs a head over the outputs of one instance. Each run overwrites `made`."""

    def __init__(self, head: Head, instance: Instance, stream: torch.cuda.Stream) -> None:
        """Capture the head. Raises what the head raises, and EngineError if it cannot be captured."""
        own = {t.untyped_storage().data_ptr() for t in instance.outputs.values()}

        def call() -> dict[str, torch.Tensor]:
            # Copy them, since the next replay overwrites the outputs while they are still on their way to the host.
            made = head(instance.outputs).items()
            return {n: t.clone() if t.untyped_storage().data_ptr() in own else t for n, t in made}

        device = stream.device
        with torch.cuda.device(device), torch.no_grad():
            with torch.cuda.stream(stream):
                call()
            stream.synchronize()
            torch.cuda.empty_cache()  # torch cannot do so during the capture, if memory runs out
            self._graph = torch.cuda.CUDAGraph()
            self.made: dict[str, torch.Tensor] = {}
            try:
                with capturing(self._graph, stream):
                    self.made = call()
            except torch.OutOfMemoryError:
                raise
            except UNCAPTURED as e:
                raise EngineError(f"the work on the model's outputs cannot be captured: {first_line(e)}") from e

    def run(self) -> None:
        """Compute `made` from the instance's outputs, on the current stream."""
        if self.made:
            self._graph.replay()
