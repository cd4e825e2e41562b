"""Host memory for the batches of a `run` command, taken and pinned while its model is loaded.

Pinning takes about a millisecond for each megabyte, and nothing of it needs the model or Python's lock.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch

from nimble_jobs.planner import Loaded
from nimble_jobs.planner.jobs.loaded import batch_buffers

log = logging.getLogger(__name__)


class EarlyBuffers:
    """The thread. Without `memory` it does nothing."""

    def __init__(self, memory: tuple[int, int] | None, device: torch.device) -> None:
        """`memory`: bytes of a batch, and how many batches."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="nimble-pin")
        self._made = None if memory is None else self._pool.submit(batch_buffers, *memory, device)

    def give(self, loaded: Loaded) -> None:
        """Hand the memory over. If it could not be had, the job takes it again and reports why it cannot."""
        made, self._made = self._made, None
        if made is None:
            return
        error = made.exception()
        if error is None:
            loaded.keep_buffers(made.result())
        else:
            log.debug("host memory was not taken early: %s", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.shutdown(wait=True)
        if self._made is not None and self._made.exception() is None:
            self._made.result().close()
