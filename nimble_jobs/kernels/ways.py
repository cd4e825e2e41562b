"""Several ways to run one kind of task: each is tried, compared with the library's, and timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from nimble_jobs.engine import measure
from nimble_jobs.engine.difference import relative_norm
from nimble_jobs.errors import EngineError
from nimble_jobs.kernels import choices
from nimble_jobs.task_times import TaskTimes

EXACT: Mapping[str, float] = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-3}  # largest relative norm from theirs


class Ways:
    """The ways of one kind of task, besides the library's."""

    def __init__(self, dtype: str) -> None:
        """`dtype`: torch's name without the prefix."""
        self.calls: dict[str, Callable[[], object]] = {}
        self.failed: dict[str, str] = {}
        self._exact = EXACT[dtype]

    def add(
        self, way: str, make: Callable[[], Callable[[], Any]], theirs: torch.Tensor, out: torch.Tensor | None = None
    ) -> None:
        """Add a way whose call gives what the library gives, or writes that into `out`; or note why it is left out."""
        try:
            call = make()
            given = call()
        except EngineError as e:
            self.failed[way] = str(e)
            return
        norm = relative_norm(given if out is None else out, theirs)
        if norm <= self._exact:
            self.calls[way] = call
        else:
            self.failed[way] = f"differs from the library by {norm:.1e}; at most {self._exact:.0e} is allowed"

    def times(self, task: str, library: Callable[[], object], gain: float, device: torch.device) -> TaskTimes:
        """Time all ways and the library's. Another one is chosen if it takes at most `gain` times as long as that."""
        calls = {"library": library} | self.calls
        us = measure.kernel_times_us(list(calls.values()), device)
        return choices.fastest_of(task, dict(zip(calls, us, strict=True)), gain, self.failed)


def ends(images: torch.Tensor) -> torch.Tensor:
    """The first and the last one: to compare all of them in fp64 would need much memory."""
    return images[:: max(1, len(images) - 1)]
