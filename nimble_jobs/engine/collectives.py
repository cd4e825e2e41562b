"""The operator by which the ranks of a training sum a tensor over all of them. It is recorded as any other operator.

Which processes take part is decided when it runs, not when it is recorded: `together` names the group of the calling
thread. While a step is recorded, searched and checked, each rank works alone, inside `rehearsing`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from nimble_jobs.device_errors import device_error
from nimble_jobs.engine.private.groups import all_reduce
from nimble_jobs.errors import EngineError, NimbleError, OutOfMemory, RankLost
from nimble_jobs.schedule import ALL_REDUCE

_NAMESPACE = "nimble_jobs"

# `turn` stands for the group: every call writes it, so dependencies keep the calls of a program in one order, whatever
# the streams. All ranks record the same order.
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")
_LIBRARY.define("all_reduce_(Tensor(a!) bucket, Tensor(b!) turn) -> ()")


class _Local(threading.local):
    group: Any = None
    rehearses = False


_LOCAL = _Local()


def all_reduce_(bucket: torch.Tensor, turn: torch.Tensor) -> None:
    """Sum `bucket` over all ranks, in place; `turn` is the same tensor in all calls of a program.

    Raises RankLost if another rank is gone, OutOfMemory, and EngineError outside of `together` and `rehearsing`.
    """
    torch.ops.nimble_jobs.all_reduce_(bucket, turn)


@contextlib.contextmanager
def together(group: Any) -> Iterator[None]:
    """Inside, this thread's calls sum over the ranks of a process group."""
    before, _LOCAL.group = _LOCAL.group, group
    try:
        yield
    finally:
        _LOCAL.group = before


@contextlib.contextmanager
def rehearsing() -> Iterator[None]:
    """Inside, this thread's calls leave their tensors as they are. What is captured there must not train."""
    before, _LOCAL.rehearses = _LOCAL.rehearses, True
    try:
        yield
    finally:
        _LOCAL.rehearses = before


def _sum(bucket: torch.Tensor, turn: torch.Tensor) -> None:
    if _LOCAL.rehearses:
        return
    if _LOCAL.group is None:
        raise EngineError(f"{ALL_REDUCE} is called, but this process is no rank of a training")
    try:
        all_reduce(_LOCAL.group, bucket)
    except RuntimeError as e:
        raise failed_exchange(e, str(bucket.device)) from e


def failed_exchange(error: RuntimeError, place: str) -> NimbleError:
    """What it means that an exchange with the other ranks failed on the device `place`: either this rank lacks memory,
    for instance for NCCL's buffers, or another one is gone.
    """
    line = str(error).strip().partition("\n")[0]
    if isinstance(device_error(error), OutOfMemory):
        return OutOfMemory(f"not enough memory on {place} to exchange values with the other ranks: {line}")
    return RankLost(f"another rank of the training is gone or does not answer: {line}")


_LIBRARY.impl("all_reduce_", _sum, "CompositeExplicitAutograd")
