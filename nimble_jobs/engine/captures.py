"""Cleans up after a capture that failed."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch

from nimble_jobs.engine.streams import borrowed

# What a call raises if it cannot be captured. Python raises SystemError if torch reports a failure without setting an
# exception, as it sometimes does for a transfer to the host.
UNCAPTURED = (RuntimeError, SystemError)
_EMPTY = "The CUDA Graph is empty"  # torch's warning; work on zero elements launches nothing


@contextlib.contextmanager
def cleared_if_failed(device: torch.device) -> Iterator[None]:
    """A context for a capture into a CUDA graph. It keeps torch's random generator of `device` usable.

    The generator notes when a capture begins, but not when one fails. Every later draw would then raise "Offset
    increment outside graph capture". An empty capture, which ends properly, puts that right.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _EMPTY)
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError), torch.cuda.device(device):  # the first failure is raised below
                torch.cuda.synchronize(device)
                with borrowed(device) as stream, torch.cuda.stream(stream):
                    graph = torch.cuda.CUDAGraph()
                    graph.capture_begin(capture_error_mode="thread_local")
                    graph.capture_end()
            raise
