"""Errors that a model raises only because it is called again and again, and not in the caller's own words."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from nimble_jobs.engine.device import synchronize
from nimble_jobs.errors import CannotRecord, DeviceFault, NimbleError, first_line


@contextlib.contextmanager
def refusing_to_prepare(device: torch.device, again: Callable[[], object]) -> Iterator[None]:
    """Around what a model is prepared by: raises CannotRecord for whatever it raises there and `again`, a step in
    eager, does not.

    What `again` raises comes through, as do errors of our own and of too little memory. Raises DeviceFault where the
    device does not answer.
    """
    try:
        yield
    except (NimbleError, torch.OutOfMemoryError):
        raise
    except Exception as e:
        try:
            synchronize(device)
        except RuntimeError as fault:
            raise DeviceFault(f"{first_line(e)}; the device no longer responds: {fault}") from e
        again()
        raise CannotRecord(f"the model fails while it is prepared: {first_line(e)}") from e
