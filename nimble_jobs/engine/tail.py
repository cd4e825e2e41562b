"""What a job wants of a model's outputs, made on the device by a small graph of its own after each replay.

The model's graph serves all jobs; what they make of its outputs differs, and a few launches from Python for each batch
would cost the host more time than a small model computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from nimble_jobs.engine.capture import Instance
from nimble_jobs.engine.captures import UNCAPTURED, cleared_if_failed
from nimble_jobs.errors import EngineError, first_line

Head = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]  # what is wanted of the outputs; hashable


class Tail:
    """Runs a head over the outputs of one instance. `made` is written over by each run."""

    def __init__(self, head: Head, instance: Instance, stream: torch.cuda.Stream) -> None:
        """Raises what the head raises, EngineError where it cannot be captured."""
        own = {t.untyped_storage().data_ptr() for t in instance.outputs.values()}

        def call() -> dict[str, torch.Tensor]:
            # The next replay writes over the outputs while they are still on their way to the host.
            made = head(instance.outputs).items()
            return {n: t.clone() if t.untyped_storage().data_ptr() in own else t for n, t in made}

        device = stream.device
        with torch.cuda.device(device), torch.no_grad():
            with torch.cuda.stream(stream):
                call()
            stream.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            self.made: dict[str, torch.Tensor] = {}
            try:
                with (
                    cleared_if_failed(device),
                    torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"),
                ):
                    self.made = call()
            except torch.OutOfMemoryError:
                raise
            except UNCAPTURED as e:
                raise EngineError(f"what is wanted of the outputs cannot be captured: {first_line(e)}") from e

    def run(self) -> None:
        """Make it, on the current stream."""
        if self.made:
            self._graph.replay()
