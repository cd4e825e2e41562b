"""All ranks of a training, as one of them sees them: what they tell each other on the host, and their sums.

Rank 0 leads: it has the job, decides, and writes. All ranks make the same calls in the same order.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from nimble_jobs.engine import collectives
from nimble_jobs.engine.device import able
from nimble_jobs.engine.private import groups
from nimble_jobs.errors import NimbleError

log = logging.getLogger(__name__)

LEADER = 0

T = TypeVar("T")


class Gang:
    """The ranks of one training, connected. Leave its `with` block once no graph holds sums of it."""

    def __init__(self, rank: int, count: int, host: Any, device: Any = None) -> None:
        """`host` is a process group for values on the host, `device` one for tensors on GPUs."""
        self.rank, self.count = rank, count
        self._host, self._device = host, device

    @staticmethod
    def connect(meeting: Path, rank: int, count: int, device: torch.device, *, timeout_s: float) -> Gang:
        """Meet the other ranks at a file. Raises RankLost if they do not come within `timeout_s`, and OutOfMemory."""

        def made() -> Gang:
            host = groups.host_group(meeting, rank, count, timeout_s=timeout_s)
            gpus = able(device).separate_memory
            on_device = groups.device_group(meeting, rank, count, device, timeout_s=timeout_s) if gpus else None
            return Gang(rank, count, host, on_device)

        return _answered(made, str(device))

    @property
    def leads(self) -> bool:
        """Whether this is the rank that has the job."""
        return self.rank == LEADER

    def summing(self) -> AbstractContextManager[None]:
        """Inside, the steps of this thread sum over all ranks."""
        return collectives.together(self._host if self._device is None else self._device)

    def numbers(self, mine: Sequence[int]) -> list[list[int]]:
        """Whole numbers of all ranks, by rank; each gives equally many. Raises RankLost."""
        sent = torch.tensor(mine, dtype=torch.int64)
        return [t.tolist() for t in _answered(lambda: groups.all_gather(self._host, sent, self.count))]

    def gather(self, value: Any) -> list[Any]:
        """JSON-able values of all ranks, by rank. Raises RankLost."""
        text = json.dumps(value).encode()
        lengths = [n for (n,) in self.numbers([len(text)])]
        sent = torch.zeros(max(lengths), dtype=torch.uint8)
        sent[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        found = _answered(lambda: groups.all_gather(self._host, sent, self.count))
        return [json.loads(t[:n].numpy().tobytes()) for t, n in zip(found, lengths, strict=True)]

    def agree(self, ask: Callable[[], int]) -> int:
        """The leader's answer, for all ranks; only the leader is asked. Raises RankLost, and what `ask` raises."""
        answer = torch.tensor([ask() if self.leads else 0], dtype=torch.int64)
        _answered(lambda: groups.broadcast(self._host, answer))
        return int(answer)

    def abort(self) -> None:
        """End what this rank waits for on its device. Any thread may call it."""
        device = self._device
        if device is not None:
            groups.abort(device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if self._device is not None and kind is None:
                torch.cuda.synchronize()  # the last sums may still run
                self._wait_for_others()
        finally:
            device, self._device = self._device, None
            if device is not None:
                groups.abort(device)

    def _wait_for_others(self) -> None:
        """Wait until all ranks have done their sums: they read what this one sent."""
        try:
            self.numbers([0])
        except NimbleError as e:
            log.warning("all sums of this rank are done, but %s", e)


def _answered(call: Callable[[], T], place: str = "the host") -> T:
    try:
        return call()
    except RuntimeError as e:
        raise collectives.failed_exchange(e, place) from e
