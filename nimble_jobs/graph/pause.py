"""A while without Python's collector of cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect no cycles in this process meanwhile, whichever thread makes them; also a decorator.

    For work that makes much that is kept, and few cycles. Looking for them takes a third of the time of planning a
    hundred thousand tasks; with torch loaded a full round takes a tenth of a second, and importing and building a model
    sets off several.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
