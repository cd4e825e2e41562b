"""Captures of work into CUDA graphs, and what is cleaned up after one that failed."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from nimble_jobs.engine.private.runtime import forget_capture
from nimble_jobs.engine.streams import borrowed

# What a call raises if it cannot be captured. Python raises SystemError if torch reports a failure without setting an
# exception, as it sometimes does for a transfer to the host.
UNCAPTURED = (RuntimeError, SystemError)
_EMPTY = "The CUDA Graph is empty"  # torch's warning; work on zero elements launches nothing


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, *, pool: Any = None) -> Iterator[None]:
    """Work that the block queues on `stream`, which is the current one inside, becomes `graph`, and does not run.

    Memory that it allocates lies in `pool`, a `torch.cuda.graph_pool_handle()`; None: in one of its own. Other threads
    may use the device meanwhile. If the capture fails, torch keeps no trace of it. Raises what the block raises, and
    one of UNCAPTURED if the device refuses.
    """
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    with warnings.catch_warnings(), torch.cuda.stream(stream):
        warnings.filterwarnings("ignore", _EMPTY)
        try:
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                yield
            except BaseException:
                with contextlib.suppress(*UNCAPTURED):  # the capture is broken already; the first error is raised below
                    graph.capture_end()
                raise
            graph.capture_end()
        except BaseException:
            _clean_up(stream.device, pool)
            raise


def _clean_up(device: torch.device, pool: Any) -> None:
    """After a capture that failed.

    torch's random generator notes when a capture begins, but not when one fails. Every later draw would then raise
    "Offset increment outside graph capture". An empty capture, which ends properly, puts that right.
    """
    forget_capture(device, pool)
    with contextlib.suppress(RuntimeError), torch.cuda.device(device):  # the first failure is the one to raise
        torch.cuda.synchronize(device)
        with borrowed(device) as stream, torch.cuda.stream(stream):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            graph.capture_end()
