"""The devices of a worker, as a command line names them: `all`, `cuda:0,cuda:2`, `cpu,cpu`."""

from __future__ import annotations

import subprocess
import sys

from nimble_jobs.errors import NimbleError, UsageError
from nimble_jobs.plural import count
from nimble_jobs.spec.units import is_single_device

ALL = "all"
MOST = 64
# Run by a process of its own, because the supervisor never loads torch. It obeys CUDA_VISIBLE_DEVICES.
_COUNT = "import torch; print(torch.cuda.device_count())"
_COUNT_S = 120.0


def devices_of(text: str, *, option: str = "--devices") -> tuple[str, ...]:
    """The devices that `text` names, in its order; `all` stands for every CUDA device, which takes seconds to find.

    Each gets a child process. `cpu` may be named several times. Raises UsageError naming the option.
    """
    if text == ALL:
        return _present(option)
    names = tuple(name.strip() for name in text.split(","))
    wrong = [name for name in names if not is_single_device(name)]
    if wrong:
        raise UsageError(f"{option}: found {wrong[0]!r}; expected all, or a list such as cuda:0,cuda:2 or cpu,cpu")
    again = [name for name in names if name != "cpu" and names.count(name) > 1]
    if again:
        raise UsageError(f"{option}: {again[0]} is named {names.count(again[0])} times; expected each GPU once")
    if len(names) > MOST:
        raise UsageError(f"{option}: found {count(len(names), 'device')}; expected at most {MOST}")
    return names


def _present(option: str) -> tuple[str, ...]:
    try:
        asked = subprocess.run(  # noqa: S603  # this interpreter, and no word of a user
            [sys.executable, "-P", "-c", _COUNT], capture_output=True, text=True, timeout=_COUNT_S, check=True
        )
        found = int(asked.stdout.split()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as e:
        raise NimbleError(f"{option}: the CUDA devices could not be counted: {e}") from e
    if not found:
        raise UsageError(f"{option}: torch finds no CUDA device on this machine; name the devices, such as cpu,cpu")
    return tuple(f"cuda:{index}" for index in range(found))
