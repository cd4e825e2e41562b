"""Checks of what `Nimble.prepare` is given besides the example."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from nimble_jobs.errors import UsageError
from nimble_jobs.kernel_switches import NOTHING, Kernel, Without


def check_options(streams: object, fuse: object, in_flight: object) -> None:
    """Raises UsageError for a value that an option cannot have."""
    if streams != "auto" and not (type(streams) is int and streams >= 1):
        raise UsageError(f"streams: found {streams!r}; expected 'auto' or a number of at least 1")
    if fuse not in ("auto", "off", "max"):
        raise UsageError(f"fuse: found {fuse!r}; expected 'auto', 'off' or 'max'")
    if not (type(in_flight) is int and in_flight >= 1):
        raise UsageError(f"in_flight: found {in_flight!r}; expected a number of at least 1")


def switched_off_in(kernels: Mapping[str, bool] | None) -> Without:
    """The kernels whose value is False. Raises UsageError for unknown names and other values."""
    if kernels is None:
        return NOTHING
    if not isinstance(kernels, Mapping):
        raise UsageError(f"kernels: found {kernels!r}; expected a dict such as {{'attention': False}}")
    known = [kernel.value for kernel in Kernel]
    for name, value in kernels.items():
        if name not in known:
            near = difflib.get_close_matches(str(name)[:60], known, 1)
            hint = f", did you mean {near[0]!r}?" if near else f"; expected {', '.join(known)}"
            raise UsageError(f"kernels: found {name!r}{hint}")
        if type(value) is not bool:
            raise UsageError(f"kernels: {name}: found {value!r}; expected True or False")
    return frozenset(Kernel(name) for name, value in kernels.items() if not value)
