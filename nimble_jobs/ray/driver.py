"""The program that talks to Ray: `python -m nimble_jobs.ray.driver`. It starts actors, and ends when all have ended.

Ray waits for minutes where nobody answers, writes to stderr as it likes, and ends its process where a cluster vanishes.
So this is a process of its own, with an end that its parent (`workers.py`) can rely on. It reads an order and then a
line for each wish to stop from stdin, and writes a line of JSON for each message to stdout. Where stdin ends, its
parent is gone; the actors then end with it.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from typing import Any

import ray
import ray.exceptions

from nimble_jobs.plural import count
from nimble_jobs.ray.member import Ended, Member, Place, verdict
from nimble_jobs.ray.order import Order

RESTARTS = 100  # of an actor whose process, worker or node dies
LAST_S = 30.0  # beyond the grace period, as for the batch systems
_LOOK_S = 0.2
_LETTERS = 500  # of an error of Ray's


class Refused(Exception):
    """The cluster cannot do what was asked."""


class Parent:
    """The process that started this one: its order, how often it has asked to stop, and what it is told."""

    def __init__(self) -> None:
        self.stops = 0
        self._out = os.dup(1)
        os.dup2(2, 1)  # Ray prints what it likes
        self.order = Order.load(sys.stdin.readline())
        threading.Thread(target=self._read, name="wishes", daemon=True).start()

    def say(self, what: str, **more: Any) -> None:
        """Send a message."""
        os.write(self._out, f"{json.dumps({'what': what, **more})}\n".encode())

    def _read(self) -> None:
        for _line in sys.stdin:
            self.stops += 1
        os._exit(1)


def main() -> int:
    """Returns 0; how it went is in the last message."""
    parent = Parent()
    order = parent.order
    try:
        ray.init(address=order.address, namespace="nimble-jobs", log_to_driver=False, logging_level=logging.ERROR)
        actors = _count(order, ray.cluster_resources())
        nodes = [node for node in ray.nodes() if node["Alive"]]
        parent.say("connected", actors=actors, nodes=len(nodes), servers=_servers(nodes))
        code, reason = Crew(parent, actors).follow()
    except Refused as error:
        code, reason = 2, str(error)
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
        code, reason = 1, f"--ray: {order.address}: {' '.join(str(error).split())[:_LETTERS]}"
        if isinstance(error, ConnectionError) and "RAY_AUTH_MODE" not in os.environ:  # Ray's own message says nothing
            reason += "; if the cluster asks for a token, set RAY_AUTH_MODE=token"
    parent.say("over", code=code, reason=reason)
    return 0


class Crew:
    """The actors, all of which are asked for at once."""

    def __init__(self, parent: Parent, actors: int) -> None:
        self._parent = parent
        order = parent.order
        member = ray.remote(Member).options(
            num_cpus=1,
            num_gpus=1 if order.gpu else 0,
            max_restarts=RESTARTS,
            max_task_retries=-1,  # a restarted actor runs its worker again
            max_concurrency=4,  # it is asked to stop while it runs
        )
        self._members: list[Any] = [member.remote(order) for _ in range(actors)]
        self._placing = {each.place.remote(): number for number, each in enumerate(self._members)}
        self._running = {each.run.remote(): number for number, each in enumerate(self._members)}
        self._ends: list[Ended] = []

    def follow(self) -> tuple[int, str]:
        """Until all have ended. Returns exit code and reason, as `verdict` does."""
        asked, deadline = 0, float("inf")
        while self._running:
            done, _ = ray.wait([*self._placing, *self._running], timeout=_LOOK_S)
            for ref in done:
                self._placed(ref) if ref in self._placing else self._ended(ref)
            stops = self._parent.stops + any(ended.code == 2 for ended in self._ends)
            if stops > asked and asked == 0:
                self._stop()
                deadline = time.monotonic() + self._parent.order.grace_s + LAST_S
            if stops > max(asked, 1) or time.monotonic() > deadline:
                self._kill(self._running.values())
                break
            asked = stops
        return verdict(self._ends)

    def _placed(self, ref: Any) -> None:
        number = self._placing.pop(ref)
        try:
            place: Place = ray.get(ref)
        except ray.exceptions.RayError:  # its run says why
            return
        self._parent.say("placed", number=number, host=place.host, pid=place.pid, waiting=len(self._placing))

    def _ended(self, ref: Any) -> None:
        number = self._running.pop(ref)
        try:
            ended: Ended = ray.get(ref)
        except ray.exceptions.RayError as error:
            ended = Ended(code=1, reason=_said(error))
        self._ends.append(ended)
        self._kill([number])  # its device is free for others
        self._parent.say("ended", number=number, code=ended.code, reason=ended.reason, left=len(self._running))

    def _stop(self) -> None:
        """Let workers stop at their next safe point; actors that still wait for a device are not needed."""
        waiting = set(self._placing.values())
        for number in self._running.values():
            if number not in waiting:
                self._members[number].stop.remote()
        for ref, number in list(self._running.items()):
            if number in waiting:
                self._kill([number])
                del self._running[ref]
        self._placing.clear()

    def _kill(self, numbers: Any) -> None:
        for number in numbers:
            ray.kill(self._members[number], no_restart=True)


def _count(order: Order, resources: dict[str, float]) -> int:
    """How many actors. Raises Refused if the cluster can never hold them."""
    kind = "GPU" if order.gpu else "CPU"
    has, cpus = int(resources.get(kind, 0)), int(resources.get("CPU", 0))
    if order.count is None and not has:
        raise Refused(f"--ray: the cluster at {order.address} has no GPU; expected at least 1, or --devices cpu")
    wanted = order.count or has
    if wanted > has:
        option = "--gpus" if order.gpu else "--devices"
        raise Refused(f"{option}: found {wanted}; expected at most {count(has, kind)}, as the Ray cluster has")
    if wanted > cpus:
        raise Refused(f"--gpus: {count(wanted, 'actor')} need a CPU each; the Ray cluster has {count(cpus, 'CPU')}")
    return wanted


def _servers(nodes: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """Hosts and ports without which this process can do nothing: Ray's head, and what serves this node."""
    context = ray.get_runtime_context()
    host, _, port = context.gcs_address.rpartition(":")
    mine = [
        (node["NodeManagerAddress"], node["NodeManagerPort"])
        for node in nodes
        if node["NodeID"] == context.get_node_id()
    ]
    return [(host.strip("[]"), int(port)), *mine]


def _said(error: Exception) -> str:
    """Ray's errors hold the tracebacks of other processes; the last line says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    missing = next((line for line in lines if "ModuleNotFoundError" in line), None)
    if missing is not None:
        return f"{missing}; expected nimble-jobs, installed on all nodes of the cluster"
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


if __name__ == "__main__":
    sys.exit(main())
