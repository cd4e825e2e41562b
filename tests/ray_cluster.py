"""A Ray cluster of one node, for tests: started by Ray's own command, and ended as by `ray stop --force`, but alone."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

_START_S = 120.0
_ADDRESS = re.compile(r"ray start --address='([^']+)'")
_FEW = [  # processes, and as little memory as Ray allows
    "--include-dashboard=false",
    "--include-log-monitor=false",
    "--no-monitor",
    "--object-store-memory=80000000",
    "--disable-usage-stats",
]


class Cluster:
    """It runs from the first moment until `kill`."""

    def __init__(self, cpus: int, home: Path) -> None:
        """`home` is the state folder that processes on its node choose."""
        # Ray puts sockets there, whose paths must be short.
        where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self._folder = Path(tempfile.mkdtemp(prefix="ray-", dir=where))
        self._out = self._folder / "out"
        ray = str(Path(sys.executable).with_name("ray"))
        command = [ray, "start", "--head", "--block", f"--num-cpus={cpus}", "--num-gpus=0", "--port=0"]
        with self._out.open("wb") as out:
            given = [f"--temp-dir={self._folder}", f"--ray-client-server-port={_free_port()}"]
            self._head = subprocess.Popen(
                [*command, *given, *_FEW],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                # Ray would run workers at niceness 15: beside other tests they would get next to no time.
                env={**os.environ, "NIMBLE_JOBS_HOME": str(home), "RAY_worker_niceness": "0"},
            )
        self.address = self._await()

    @property
    def alive(self) -> bool:
        return self._head.poll() is None

    def kill(self) -> None:
        """SIGKILL for every process of it, at once."""
        processes = [self._head.pid, *(p.pid for p in psutil.Process(self._head.pid).children(recursive=True))]
        for pid in processes:
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue
        self._head.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def actors(self) -> list[psutil.Process]:
        """The processes of our actors."""
        found = psutil.Process(self._head.pid).children(recursive=True)
        return [process for process in found if _title(process).startswith("ray::Member")]

    def _await(self) -> str:
        deadline = time.monotonic() + _START_S
        while True:
            said = self._out.read_text()
            address = _ADDRESS.search(said)
            if address and "Ray runtime started" in said:
                return address[1]
            assert self._head.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.05)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
