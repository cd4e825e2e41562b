"""Waiting for what other threads and processes do, however busy the cores are."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 120.0  # a hang has to last for this long to be taken for one


def until(condition: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
    """The first true value of `condition`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return value
