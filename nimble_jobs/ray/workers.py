"""Workers as actors of a Ray cluster, started by a command that lives as long as they do. Loads neither Ray nor torch.

Ray places them, starts them again, and takes their devices back. Jobs, shards and outputs are in our store alone, so
that Ray's end costs no more than any worker's.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from nimble_jobs.errors import NimbleError, UsageError
from nimble_jobs.plural import count
from nimble_jobs.ray.order import EXTRA, Order, SqliteHome, Versions
from nimble_jobs.settings import read_settings
from nimble_jobs.spec.units import show
from nimble_jobs.store.home import identity
from nimble_jobs.store.leases import boot_id
from nimble_jobs.worker import logs
from nimble_jobs.worker.signals import StopSignals

log = logging.getLogger(__name__)

ANSWER_S = 5.0  # until something at the address accepts a connection
CONNECT_S = 60.0  # until Ray says that it is connected
LOOK_S = 0.5
PULSE_S = 5.0  # between two looks whether the cluster is there
KNOCK_S = 1.0
GONE_S = 60.0  # for as long Ray itself waits for its head node
LAST_S = 10.0  # until the driver ends after its last message
_MOST = 4096
_ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")
AUTO = "auto"


def order_of(
    home: Path,
    *,
    address: str,
    gpus: int | None = None,
    cpus: int | None = None,
    node_home: str | None = None,
    max_idle_s: float | None = None,
    gpu_memory_bytes: int | None = None,
) -> Order:
    """The order for actors with a GPU each, `gpus` or as many as the cluster has; or for `cpus` actors on the CPU.

    Raises UsageError for values that cannot be used, and if Ray is not installed; SettingsError, StoreError.
    """
    if importlib.util.find_spec("ray") is None:
        raise UsageError(f"--ray: Ray is not installed; install it with: {EXTRA}")
    if address != AUTO:
        _place(address)
    if gpus is not None and not 1 <= gpus <= _MOST:
        raise UsageError(f"--gpus: found {gpus}; expected a number from 1 to {_MOST}")
    settings = read_settings(home)
    database = settings.database  # without a password, wherever it comes from
    if database is not None and not database.startswith("postgresql"):
        database = None
    if node_home is not None and database is None:
        raise UsageError("--node-home: found a state folder for each node; expected jobs in PostgreSQL, not SQLite")
    return Order(
        address=address,
        count=gpus if cpus is None else cpus,
        gpu=cpus is None,
        home=node_home or str(home),
        database=database,
        sqlite=SqliteHome(identity=identity(home) or "", boot=boot_id()) if database is None else None,
        versions=Versions.here(),
        max_idle_s=max_idle_s,
        gpu_memory_bytes=gpu_memory_bytes,
        grace_s=settings.limits.grace,
    )


def run(home: Path, order: Order, *, max_time_s: float | None = None) -> int:
    """Start the workers and wait until all have ended: by SIGTERM, SIGINT or `max_time_s`, or each after its idle time.
    After a signal, running jobs reach a safe point; a second one ends them at once. Returns 0.

    Raises UsageError if the cluster or a node cannot be used as the order says, NimbleError if it does not answer, if
    it vanishes, or if no worker could be used.
    """
    logs.to_stderr()
    if order.address != AUTO:
        _knock(order.address)
    log_path = home / "logs" / f"ray-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(3)}.log"
    with StopSignals(max_time_s) as signals, _driver(log_path) as driver:
        return _Watch(order, driver, signals, log_path).follow()


class _Watch:
    """Relays signals to the driver, and its messages to the log."""

    def __init__(self, order: Order, driver: subprocess.Popen[bytes], signals: StopSignals, log_path: Path) -> None:
        self._order, self._driver, self._signals, self._log_path = order, driver, signals, log_path
        assert driver.stdout is not None
        self._out = driver.stdout.fileno()
        self._read = b""  # of a message whose end is still to come
        self._told = 0  # wishes to stop
        self._pulse: Pulse | None = None  # once the driver is connected

    def follow(self) -> int:
        """Until the driver says that all is over. Raises UsageError, NimbleError."""
        deadline = time.monotonic() + CONNECT_S
        self._tell(self._order.dump())
        while True:
            ready = wait([self._out, self._signals.fileno()], timeout=LOOK_S)
            self._signals.clear()
            while self._told < self._signals.count + self._signals.time_over:
                self._told += 1
                log.info("asked to stop" if self._told == 1 else "asked to stop at once")
                self._tell("stop")
            if self._out in ready:
                for message in self._messages():
                    code = self._hear(message)
                    if code is not None:
                        return code
            if self._pulse is not None:
                if self._pulse.lost():
                    raise NimbleError(self._vanished())
            elif self._told:
                return 0
            elif time.monotonic() >= deadline:
                raise NimbleError(
                    f"--ray: {self._order.address} did not answer as a Ray cluster within {CONNECT_S:.0f} s; expected "
                    f"the address of its head node, given on a machine of the cluster ({self._log_path})"
                )

    def _messages(self) -> Iterator[dict[str, Any]]:
        """What has arrived. Raises NimbleError if no more will come."""
        received = os.read(self._out, 1 << 16)
        if not received:
            raise NimbleError(self._vanished())
        *lines, self._read = (self._read + received).split(b"\n")
        yield from map(json.loads, lines)

    def _tell(self, line: str) -> None:
        assert self._driver.stdin is not None
        try:
            self._driver.stdin.write(f"{line}\n".encode())
            self._driver.stdin.flush()
        except BrokenPipeError:  # it has ended, which its stdout says, too
            return

    def _hear(self, message: dict[str, Any]) -> int | None:
        """The exit code if this is the last message. Raises UsageError, NimbleError."""
        match message:
            case {"what": "connected", "actors": actors, "nodes": nodes, "servers": servers}:
                self._pulse = Pulse([(host, port) for host, port in servers])
                on = "GPU" if self._order.gpu else "CPU"
                log.info("%s with a %s each, on a cluster of %s", count(actors, "actor"), on, count(nodes, "node"))
            case {"what": "placed", "number": number, "host": host, "pid": pid, "waiting": waiting}:
                more = f"; {waiting} more wait for a device" if waiting else ""
                log.info("actor %d: on %s, process %d%s", number, host, pid, more)
            case {"what": "ended", "number": number, "code": code, "reason": reason, "left": left}:
                say = log.error if code else log.info
                say("actor %d: ended%s; %d left", number, f": {reason}" if reason else "", left)
            case {"what": "over", "code": 0}:
                return 0
            case {"what": "over", "code": code, "reason": reason}:
                raise UsageError(reason) if code == UsageError.exit_code else NimbleError(reason)
        return None

    def _vanished(self) -> str:
        what = "the Ray cluster is gone" if self._pulse else "Ray did not start"
        return (
            f"{what} ({self._order.address}); jobs that its workers had begun go on with any other worker "
            f"({self._log_path})"
        )


class Pulse:
    """Whether the cluster still answers, since Ray itself would wait for it without end."""

    def __init__(self, servers: Sequence[tuple[str, int]]) -> None:
        """Hosts and ports; without any one of them the actors cannot be looked after."""
        self._servers = servers
        self._heard_at = self._asked_at = time.monotonic()

    def lost(self) -> bool:
        """Whether one did not answer for GONE_S. Asks them from time to time, for at most KNOCK_S each."""
        if time.monotonic() - self._asked_at >= PULSE_S:
            if all(_answers(host, port, KNOCK_S) is None for host, port in self._servers):
                self._heard_at = time.monotonic()
            self._asked_at = time.monotonic()
        return self._asked_at - self._heard_at >= GONE_S


@contextmanager
def _driver(log_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The process that talks to Ray. It is gone at the end, and with it the actors."""
    command = [sys.executable, "-P", "-m", "nimble_jobs.ray.driver"]
    with log_path.open("ab") as errors:
        process = subprocess.Popen(  # noqa: S603  # this interpreter, and no word of a user
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # Ctrl-C reaches this process alone
        )
    try:
        yield process
        process.wait(timeout=LAST_S)
    except subprocess.TimeoutExpired:
        log.debug("the driver did not end by itself")
    finally:
        process.kill()
        process.communicate()


def _knock(address: str) -> None:
    """Raises NimbleError if nothing listens at the address."""
    host, port = _place(address)
    why = _answers(host, port, ANSWER_S)
    if why is not None:
        raise NimbleError(
            f"--ray: {address}: {why} (waited at most {ANSWER_S:.0f} s); expected the address of a Ray cluster's head "
            "node, such as 10.0.0.1:6379"
        )


def _answers(host: str, port: int, limit_s: float) -> str | None:
    """None if a connection is accepted, else why not."""
    try:
        socket.create_connection((host, port), timeout=limit_s).close()
    except OSError as error:
        return error.strerror or "no answer"
    return None


def _place(address: str) -> tuple[str, int]:
    """Host and port. Raises UsageError."""
    parts = _ADDRESS.fullmatch(address)
    port = int(parts["port"]) if parts else 0
    if parts is None or not 1 <= port <= 65535:
        client = "; Ray's client (ray://) is not used: start the workers on a node" if "://" in address else ""
        raise UsageError(f"--ray: found {show(address)}; expected HOST:PORT, or auto on a node of the cluster{client}")
    return parts["host"].strip("[]"), port
