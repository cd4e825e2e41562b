"""The leader's side of the other ranks' processes: starts them, hears from them, and ends them.

A follower writes one JSON line: {"ready": true} once it has its step, or {"error": ...} if it fails. It reads two: what
it is to do, and once the leader has its own step, how that step runs. It ends when the leader does.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch

from nimble_jobs import errors
from nimble_jobs.device_errors import device_error
from nimble_jobs.errors import DeviceFault, JobFailed, NimbleError, RankLost, first_line
from nimble_jobs.workloads.training.ranks.gang import Gang

log = logging.getLogger(__name__)

PROGRAM = "nimble_jobs.workloads.training.follower"
_LOOK_S = 0.1
_LEAVING_S = 20.0  # for followers to end by themselves after a training
_TELLING_S = 5.0  # for a follower that failed to say why


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a follower is told first."""

    home: str
    job: str
    attempt: int
    rank: int
    count: int
    device: str
    threads: int  # that it computes with on a CPU
    meeting: str  # path of the file where the ranks meet
    timeout_s: float  # the longest wait for another rank


class Followers:
    """The processes of all ranks but the first. Use it in a `with` block; afterwards none of them is left."""

    def __init__(self, parts: Sequence[Part], folder: tempfile.TemporaryDirectory[str]) -> None:
        """`folder` holds their meeting, and is removed afterwards."""
        self._folder = folder
        self._running: list[_Follower] = []
        self._closing = self._aborted = False
        self._meeting, self._timeout_s, self._count = Path(parts[0].meeting), parts[0].timeout_s, parts[0].count
        try:
            for part in parts:
                self._running.append(_Follower(part))
        except OSError as e:
            self._end()
            raise JobFailed(f"run.gpus: a process for another rank could not be started: {e.strerror or e}") from e

    @classmethod
    def start(cls, devices: Sequence[str], *, timeout_s: float, **given: Any) -> Self:
        """A process for each device but the first, which is the leader's. `given` is the rest of each `Part`."""
        folder = tempfile.TemporaryDirectory(prefix="nimble-jobs-ranks-", ignore_cleanup_errors=True)
        meeting = str(Path(folder.name) / "meeting")
        parts = [
            Part(rank=rank, count=len(devices), device=device, meeting=meeting, timeout_s=timeout_s, **given)
            for rank, device in enumerate(devices)
            if rank
        ]
        return cls(parts, folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._end(at_once=False)
            return
        told = self._told() if self._follows(error) else None
        self._end()
        if told is not None:
            log.warning("%s; the reason is %s", first_line(error), told)
            told.ends_process = True  # as with RankLost
            raise told from None  # the leader's error only follows from it

    def meet(self, order: Mapping[str, Any], device: torch.device, check: Callable[[], None]) -> Gang:
        """Tell all what the leader's step is, wait until they have theirs, and connect.

        `check` is called meanwhile, and may raise. Raises what a follower says, and RankLost.
        """
        for follower in self._running:
            follower.tell(order)
        while late := [follower for follower in self._running if not follower.ready]:
            check()
            late[0].failure(wait_s=_LOOK_S)
            self._look()
        gang = self._connected(device, check)
        threading.Thread(target=self._watch, args=(gang,), name="nimble-ranks", daemon=True).start()
        return gang

    def _connected(self, device: torch.device, check: Callable[[], None]) -> Gang:
        """Connect with all. Raises as `meet`, and leaves the connection to time out if one of them fails meanwhile."""
        connecting: Future[Gang] = Future()

        def connect() -> None:
            try:
                gang = Gang.connect(self._meeting, 0, self._count, device, timeout_s=self._timeout_s)
            except BaseException as e:  # noqa: BLE001 - it is raised by who waits
                connecting.set_exception(e)
                return
            if self._closing:
                gang.abort()  # nobody waits any more
            connecting.set_result(gang)

        threading.Thread(target=connect, name="nimble-ranks-meet", daemon=True).start()
        while not wait([connecting], _LOOK_S).done:
            check()
            self._look()
        return connecting.result()

    def _look(self) -> None:
        """Raises what a follower says, and RankLost if one of them died."""
        for follower in self._running:
            told = follower.failure()
            if told is not None:
                raise told
            if follower.silent:
                raise follower.died()

    def telling(self) -> AbstractContextManager[None]:
        """The leader has nobody to tell: the job ends with its error."""
        return nullcontext()

    def _watch(self, gang: Gang) -> None:
        """End what the leader waits for once a rank has failed: on its device by ending the sums, on its host by ending
        that rank's process, whose connections then close.
        """
        while not self._closing:
            # One that ended with 0 has done its part; on GPUs, it has waited until the leader had done its own.
            gone = [f for f in self._running if f.failure() is not None or f.process.poll() not in (None, 0)]
            if gone and not self._closing:
                log.warning("rank %d has failed", gone[0].rank)
                self._aborted = True
                gang.abort()
                for follower in gone:
                    follower.leave(_TELLING_S)
                return
            time.sleep(_LOOK_S)

    def _follows(self, error: BaseException) -> bool:
        """Whether the leader's error may follow from another rank's: that rank no longer answers, or its sums ended."""
        known = device_error(error)
        return isinstance(known, RankLost) or (self._aborted and isinstance(known, DeviceFault))

    def _told(self) -> NimbleError | None:
        """Why a follower failed, or which of them died; None if all of them live.

        Those that only lost another rank say so first if that one is slow.
        """
        until, lost = time.monotonic() + _TELLING_S, None
        while True:
            for failure in [failure for f in self._running if (failure := f.failure()) is not None]:
                if not isinstance(failure, RankLost):
                    return failure
                lost = lost or failure
            dead = [f for f in self._running if f.silent and f.failure() is None]
            if dead:
                return dead[0].died()
            if all(f.silent for f in self._running) or time.monotonic() > until:
                return lost
            time.sleep(_LOOK_S)

    def _end(self, *, at_once: bool = True) -> None:
        self._closing = True
        until = time.monotonic() + (0.0 if at_once else _LEAVING_S)
        for follower in self._running:
            follower.end(max(0.0, until - time.monotonic()))
        self._folder.cleanup()


class _Follower:
    """One process."""

    def __init__(self, part: Part) -> None:
        self.rank = part.rank
        self._place = f"rank {part.rank} ({part.device})"
        self._listening = threading.Lock()
        self.ready = False  # it has said that it has its step
        self._failure: NimbleError | None = None
        self._heard = bytearray()
        self.silent = False  # it will say nothing more
        self._ear, mouth = os.pipe()
        try:
            command = [sys.executable, "-m", PROGRAM, str(mouth), str(os.getpid())]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(mouth,))  # noqa: S603 - our own
        finally:
            os.close(mouth)
        self.tell(asdict(part))

    def tell(self, order: Mapping[str, Any]) -> None:
        """Write it a line. If it is dead, `silent` says so later."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            log.warning("rank %d no longer listens", self.rank)

    def died(self) -> RankLost:
        """That it is gone, once it is silent."""
        return RankLost(f"the process of rank {self.rank} ended: {_ending(self.process.wait())}")

    def leave(self, wait_s: float) -> None:
        """Let it end by itself for a while, then kill it; its words are kept."""
        try:
            self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            log.warning("rank %d said why it fails, but does not end", self.rank)
            self.process.kill()

    def failure(self, wait_s: float = 0.0) -> NimbleError | None:
        """What it has said of its failure so far."""
        self._listen(wait_s)
        return self._failure

    def end(self, wait_s: float) -> None:
        """Let it end by itself for a while, then kill it."""
        assert self.process.stdin is not None
        try:
            self.process.wait(wait_s if wait_s > 0 else 0.001)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        try:
            self.process.stdin.close()
        except OSError:  # what was not written any more
            log.debug("rank %d had not read all", self.rank)
        with self._listening:
            os.close(self._ear)
            self.silent = True

    def _listen(self, wait_s: float) -> None:
        with self._listening:
            self._hear(wait_s)

    def _hear(self, wait_s: float) -> None:
        if self.silent or not select.select([self._ear], [], [], wait_s)[0]:
            return
        found = os.read(self._ear, 1 << 16)
        self.silent = not found
        self._heard += found
        while b"\n" in self._heard:
            line, _, rest = self._heard.partition(b"\n")
            self._heard = bytearray(rest)
            said = json.loads(line)
            self.ready = self.ready or "ready" in said
            if "error" in said and self._failure is None:
                self._failure = _raised(self._place, **said["error"])


def told_as(error: NimbleError) -> dict[str, str]:
    """An error as a follower says it."""
    return {"kind": type(error).__name__, "message": str(error)}


def _raised(place: str, *, kind: str, message: str) -> NimbleError:
    """The error that a follower says, as the leader raises it."""
    found = getattr(errors, kind, JobFailed)
    text = f"{place}: {message}"
    try:
        return found(text) if issubclass(found, NimbleError) else JobFailed(text)
    except TypeError:  # one that takes more than a message
        return JobFailed(text)


def _ending(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
