"""Processes that must not outlive the one that started them."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys

log = logging.getLogger(__name__)

ORPHANED = 70  # exit code

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent, whose process id is given, dies; end it if that has died.

    A closed pipe says so too, but not while a call hangs.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            log.warning("PR_SET_PDEATHSIG: %s", os.strerror(ctypes.get_errno()))
    if os.getppid() != parent:
        os._exit(ORPHANED)
