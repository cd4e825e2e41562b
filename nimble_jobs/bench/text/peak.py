"""Peak memory of a process with all that it started: sampled from outside, so that nothing is measured from within."""

from __future__ import annotations

import shutil
import subprocess
import threading
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import psutil

_EVERY_S = 0.25
_SMI = "nvidia-smi"
_MIB = 1 << 20


class Peak:
    """Samples while its `with` block runs, once `watch` has named the process.

    Host memory counts a page that n processes share as one nth in each (PSS). Device memory is what nvidia-smi counts
    on the first device beyond what was in use before, context and code of kernels included; None without nvidia-smi.
    """

    def __init__(self) -> None:
        self.host_bytes = 0
        self.device_bytes: int | None = None
        self._process: psutil.Process | None = None
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._host, name="peak memory", daemon=True)]
        self._smi: subprocess.Popen[str] | None = None
        path = shutil.which(_SMI)
        if path is not None:
            query = [path, "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--loop-ms=250"]
            self._smi = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)  # noqa: S603  # fixed words
            self._threads.append(threading.Thread(target=self._device, name="peak device memory", daemon=True))

    def watch(self, process: Any) -> None:
        """Name the process, as subprocess.Popen has started it."""
        with suppress(psutil.Error):  # it is over already
            self._process = psutil.Process(process.pid)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        if self._smi is not None:
            self._smi.terminate()
            self._smi.wait()
        for thread in self._threads:
            thread.join()

    def _host(self) -> None:
        while not self._over.wait(_EVERY_S):
            if self._process is not None:
                with suppress(psutil.Error):
                    family = [self._process, *self._process.children(recursive=True)]
                    self.host_bytes = max(self.host_bytes, sum(map(_proportional, family)))

    def _device(self) -> None:
        assert self._smi is not None
        assert self._smi.stdout is not None
        first: int | None = None
        for line in self._smi.stdout:
            if line.strip().isdecimal():
                used = int(line) * _MIB
                first = used if first is None else first
                self.device_bytes = max(self.device_bytes or 0, used - first)


def _proportional(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:  # it has ended
        return 0
