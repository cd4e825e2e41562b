"""Workers, and who of them is alive. A worker holds a file lock while it lives; the kernel releases it afterwards.

In a database that several machines share, a worker holds a lease as well, since its lock is seen on its machine only.

The lock is `flock` itself: it outlives no process, needs no clock, and is never replaced by a weaker kind. A worker
takes the first free slot and never deletes its file, so that nobody can lock a deleted file.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from nimble_jobs.errors import NotFound, StoreError
from nimble_jobs.store.ids import random_id
from nimble_jobs.store.leases import Holder, Leases, Watch, boot_id, folder_id
from nimble_jobs.store.locks import EXCLUSIVE, SHARED, Lock
from nimble_jobs.store.records import WorkerInfo
from nimble_jobs.whole import write_whole

_MAX_SLOTS = 4096


class WorkerLease:
    """A held worker lock. It ends with `release`, or with the process."""

    def __init__(
        self, *, worker_id: str, lock: Lock, info_file: Path, info: Mapping[str, Any], leases: Leases | None = None
    ) -> None:
        self.id = worker_id
        self._lock = lock
        self._info_file = info_file
        self._info = dict(info)
        self._leases = leases
        self._watch: Watch | None = None

    @property
    def info(self) -> dict[str, Any]:
        """The info that `workers` lists about this worker."""
        return dict(self._info)

    @property
    def in_place(self) -> bool:
        """Whether others can find the lock, which they cannot if its folder was replaced, and the lease still runs."""
        return self._lock.in_place and not (self._watch and self._watch.lost)

    def enter(self) -> None:
        """Tell others about this worker, and take a lease if the database needs one. Raises StoreError."""
        self.update()
        if self._leases is not None:
            self._leases.begin(self.id, self._info_file.parent, self._info)
            self._watch = Watch(self._leases, self.id, info=lambda: self._info)

    def update(self, **info: Any) -> None:
        """Change the info that others see, for instance `status`. Raises StoreError."""
        self._info = self._info | info  # another thread reads it
        if self._watch is not None:
            self._watch.soon()
        text = json.dumps(self._info, sort_keys=True, default=str)
        try:
            # Not synced, because after a power cut nobody holds the lock.
            write_whole(self._info_file, text.encode(), durable=False)
        except OSError as e:
            raise StoreError(f"{self._info_file}: {e.strerror}; a worker needs to write here") from e

    def release(self) -> None:
        """Release lease and lock. A second call does nothing."""
        watch, self._watch = self._watch, None
        if watch is not None and self._leases is not None:
            watch.close()
            with suppress(StoreError):  # it ends by itself
                self._leases.end(self.id)
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Workers:
    """The workers of a state folder, or with `leases` those of the database, whatever their state folder."""

    def __init__(self, folder: Path, leases: Leases | None = None) -> None:
        self._folder = folder
        self._leases = leases
        self._followed: list[Watch] = []

    def hold(self, info: Mapping[str, Any]) -> WorkerLease:
        """Become a worker: take a lock that lasts as long as this process.

        Others see `info`; they expect device and status, and pid and started_at are added.
        Raises StoreError if the file system has no locks.
        """
        with suppress(OSError):  # opening the lock reports the problem
            self._folder.mkdir(mode=0o700, exist_ok=True)
        for slot in range(_MAX_SLOTS):
            path = self._lock_file(slot)
            if path.exists() and not path.is_file():
                continue  # there is a folder of that name
            lock = Lock(path)
            if not lock.take(EXCLUSIVE):
                lock.close()
                continue
            worker_id = f"{slot}-{random_id(8 if self._leases is None else 12)}"
            known = {
                "pid": os.getpid(),
                "started_at": time.time(),
                "device": "",
                "status": "idle",
                **info,
                "id": worker_id,
            }
            lease = WorkerLease(
                worker_id=worker_id, lock=lock, info_file=self._info_file(slot), info=known, leases=self._leases
            )
            try:
                lease.enter()
            except BaseException:
                lease.release()
                raise
            return lease
        raise StoreError(f"{self._folder}: {_MAX_SLOTS} workers hold locks already")

    def follow(self, worker_id: str, over: Callable[[], None]) -> None:
        """For a worker's child process: write only while the worker's lease runs, and call `over` if it ended for good.

        Without leases this does nothing: the child dies with its worker. Raises StoreError.
        """
        if self._leases is not None:
            self._followed.append(Watch(self._leases, worker_id, over=over))

    def here(self, info: WorkerInfo) -> bool:
        """Whether this is a worker of this state folder, so that its process id means something here."""
        return self._leases is None or self._is_here(info.info["boot"], info.info["folder"])

    def known(self, worker_id: str) -> bool:
        """Whether this worker was of this folder, which remembers the last one of each lock."""
        slot = _slot(worker_id)
        return slot is not None and (self._read_info(slot) or {}).get("id") == worker_id

    def alive(self, worker_id: str) -> bool:
        """Whether this worker is alive. If its info file cannot be read, the holder of a lock counts as alive."""
        if self._leases is not None:
            holder = self._leases.holder(worker_id)
            return holder is not None and not self._died_here(holder)
        return self._locked(worker_id)

    def census(self) -> Callable[[str], bool]:
        """As `alive`, for many workers: leases are read once, at the first question. Whoever had none then is asked
        for again, so that a worker that began meanwhile is not taken for dead.
        """
        leases, known = self._leases, set[str]()
        if leases is None:
            return self.alive

        def alive(worker_id: str) -> bool:
            if not known:
                known.update(holder.id for holder in leases.holders() if not self._died_here(holder))
            return worker_id in known or self.alive(worker_id)

        return alive

    def dead(self) -> Callable[[str], bool]:
        """Tells of a worker, by its id, whether it is gone for good: it writes nothing any more, even if it is only cut
        off and comes back, so what it had is free. Not the opposite of `alive`: a lease may end and be renewed.
        """
        leases, alive = self._leases, self.census()
        if leases is None:
            return lambda worker_id: not alive(worker_id)
        leases.suspect()

        def dead(worker_id: str) -> bool:
            if alive(worker_id):
                return False
            holder = leases.holder(worker_id, ended=True)
            return leases.bury(worker_id, certain=holder is None or self._died_here(holder))

        return dead

    def live(self, *roles: str) -> list[WorkerInfo]:
        """The processes that hold locks or leases now; if roles are given, only processes with one of them."""
        found = self._holders() if self._leases is not None else self._locks()
        return [info for info in found if not roles or info.info.get("role") in roles]

    def forget(self) -> None:
        """Remove what is kept of workers that were gone long ago."""
        if self._leases is not None:
            self._leases.forget()

    def close(self) -> None:
        """Follow no lease any more, and close the connections for leases."""
        for watch in self._followed:
            watch.stop()
        if self._leases is not None:
            self._leases.close()

    def chosen(self, ids: Sequence[str] | None) -> list[WorkerInfo]:
        """The workers with these ids, or all running ones (None). Raises NotFound for a worker that does not run."""
        live = self.live("worker")
        for name in ids or ():
            if all(info.id != name for info in live):
                raise NotFound(f"no worker {name} is running; list workers with: nimble-jobs worker ls")
        return [info for info in live if ids is None or info.id in ids]

    def _locked(self, worker_id: str) -> bool:
        slot = _slot(worker_id)
        if slot is None or not self._held(slot):
            return False
        info = self._read_info(slot)
        return info is None or info.get("id") == worker_id

    def _locks(self) -> Iterator[WorkerInfo]:
        for slot in self._slots():
            if self._held(slot):
                info = self._read_info(slot) or {}
                yield _told(str(info.get("id", f"{slot}-unknown")), info)

    def _holders(self) -> Iterator[WorkerInfo]:
        assert self._leases is not None
        for holder in self._leases.holders():
            if not self._died_here(holder):
                there: dict[str, Any] = {"host": holder.host, "boot": holder.boot, "folder": holder.folder}
                # Times of another boot's clock mean nothing here.
                other = () if holder.boot == boot_id() else ("seen_at", "moved_at")
                known = {name: value for name, value in holder.info.items() if name not in other}
                if other:
                    there["lease_left_s"] = holder.left_s
                yield _told(holder.id, known | there)

    def _died_here(self, holder: Holder) -> bool:
        """Whether it was a worker of this folder, on this machine, whose lock is free: its lease only has to end."""
        return self._is_here(holder.boot, holder.folder) and not self._locked(holder.id)

    def _is_here(self, boot: str, folder: str) -> bool:
        """Whether this is the folder, on this machine. Another machine may have one of the same device and inode."""
        return boot == boot_id() and folder == folder_id(self._folder)

    def _slots(self) -> Iterator[int]:
        return iter(sorted(int(file.stem) for file in self._folder.glob("*.lock") if file.stem.isdigit()))

    def _held(self, slot: int) -> bool:
        path = self._lock_file(slot)
        if not path.is_file():
            return False
        with Lock(path) as lock:
            return not lock.take(SHARED)  # shared, so that two readers do not see each other's locks

    def _read_info(self, slot: int) -> dict[str, Any] | None:
        try:
            value = json.loads(self._info_file(slot).read_text())
        except (OSError, ValueError):
            return None
        return value if isinstance(value, dict) else None

    def _lock_file(self, slot: int) -> Path:
        return self._folder / f"{slot}.lock"

    def _info_file(self, slot: int) -> Path:
        return self._folder / f"{slot}.json"


def _told(worker_id: str, info: dict[str, Any]) -> WorkerInfo:
    return WorkerInfo(
        id=worker_id,
        pid=int(info.get("pid", 0)),
        device=str(info.get("device", "")),
        started_at=float(info.get("started_at", 0.0)),
        status=str(info.get("status", "unknown")),
        info=info,
    )


def _slot(worker_id: str) -> int | None:
    number = worker_id.partition("-")[0]
    return int(number) if number.isascii() and number.isdigit() else None
