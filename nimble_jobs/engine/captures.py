"""What a capture that fails leaves behind, cleared away."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch

# What a call raises that cannot be captured. SystemError is Python's, where torch reports a failure without setting an
# exception, as it does now and then for a transfer to the host.
UNCAPTURED = (RuntimeError, SystemError)
_EMPTY = "The CUDA Graph is empty"  # a warning of torch's; work over no elements launches nothing


@contextlib.contextmanager
def cleared_if_failed(device: torch.device) -> Iterator[None]:
    """Around a capture into a CUDA graph, for the sake of torch's random generator of `device`.

    It notes where a capture begins, but not the end of one that fails. Every draw then raises "Offset increment outside
    graph capture". An empty capture, which does end, puts that right.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _EMPTY)
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError), torch.cuda.device(device):  # what failed is raised
                torch.cuda.synchronize(device)
                stream = torch.cuda.Stream(device)
                with torch.cuda.stream(stream):
                    graph = torch.cuda.CUDAGraph()
                    graph.capture_begin(capture_error_mode="thread_local")
                    graph.capture_end()
            raise
