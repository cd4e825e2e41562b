"""Private names around process groups: several processes of one host that exchange tensors.

The groups are made without torch's default group, so that a process can take part in one job after another.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

dist: Any = torch.distributed  # its annotations leave out much of what it offers
_LOOPBACK = "127.0.0.1"


def host_group(meeting: Path, rank: int, count: int, *, timeout_s: float) -> Any:
    """A group over gloo, for tensors on the host. It is complete when all `count` processes have called this.

    They meet at the file `meeting`. Raises RuntimeError if they do not come within `timeout_s`.
    """
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupGloo(_store(meeting, "host", count, timeout_s), rank, count, options)


def device_group(meeting: Path, rank: int, count: int, device: torch.device, *, timeout_s: float) -> Any:
    """A group over NCCL, for tensors on GPUs, each of another process. The first collective connects it.

    Call `abort` before the last reference to it is gone.
    """
    # Otherwise a thread of the group asks every second at the meeting whether others wait in vain. Once that file is
    # removed, it waits for it until the timeout, and whoever frees the group waits for the thread, with Python's lock.
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    with torch.cuda.device(device):
        return dist.ProcessGroupNCCL(_store(meeting, "device", count, timeout_s), rank, count, options)


def all_reduce(group: Any, tensor: torch.Tensor) -> None:
    """Sum a tensor over all ranks, in place. On a GPU it runs on the current stream, also in a capture."""
    options = dist.AllreduceOptions()
    options.asyncOp = False
    work = group.allreduce([tensor], options)
    if work is not None:
        work.wait()


def all_gather(group: Any, tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """The tensors of all ranks, which have one shape and type, in the order of the ranks."""
    found = [torch.empty_like(tensor) for _ in range(count)]
    group.allgather([found], [tensor]).wait()
    return found


def broadcast(group: Any, tensor: torch.Tensor) -> None:
    """Give all ranks the tensor of rank 0, in place."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()


def abort(group: Any) -> None:
    """End what a group's processes wait for, on the host and on the device. Waits for graphs that hold sums of it."""
    group.abort()


def _store(meeting: Path, name: str, count: int, timeout_s: float) -> Any:
    store = dist.FileStore(str(meeting), count)
    store.set_timeout(timedelta(seconds=timeout_s))
    return dist.PrefixStore(name, store)
