"""Ranks of a training as threads of one process, over gloo."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from nimble_jobs.engine.collectives import together
from nimble_jobs.engine.private.groups import abort, all_gather, host_group

T = TypeVar("T")
LONG_S = 120.0


class Threads:
    """One rank among threads: what `planner.step.reduction.Peers` is."""

    def __init__(self, group: Any, rank: int, count: int) -> None:
        self._group = group
        self.rank, self.count = rank, count

    def close(self) -> None:
        """Leave the others, whose next exchange fails."""
        abort(self._group)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank."""
        text = json.dumps(value).encode()
        lengths = [int(n) for n in all_gather(self._group, torch.tensor([len(text)]), self.count)]
        padded = torch.tensor([*text, *[0] * (max(lengths) - len(text))], dtype=torch.uint8)
        found = all_gather(self._group, padded, self.count)
        return [json.loads(bytes(t[:n].tolist())) for t, n in zip(found, lengths, strict=True)]


def as_ranks(count: int, meeting: Path, work: Callable[[Threads], T]) -> list[T]:
    """What `work` returns on each rank. Raises what it raises on one of them."""
    found: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            group = host_group(meeting, rank, count, timeout_s=LONG_S)
            with together(group):
                found[rank] = work(Threads(group, rank, count))
        except BaseException as e:  # noqa: BLE001 - the test raises it
            errors.append(e)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error
    return [found[rank] for rank in range(count)]
