"""Worker locks, which tell who is alive. A worker holds a file lock while it lives; the kernel releases it afterwards.

The lock is `flock` itself: it outlives no process, needs no clock, and is never replaced by a weaker kind. A worker
takes the first free slot and never deletes its file, so that nobody can lock a deleted file.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from nimble_jobs.errors import NotFound, StoreError
from nimble_jobs.store.ids import random_id
from nimble_jobs.store.locks import EXCLUSIVE, SHARED, Lock
from nimble_jobs.store.records import WorkerInfo
from nimble_jobs.whole import write_whole

_MAX_SLOTS = 4096


class WorkerLease:
    """A held worker lock. It ends with `release`, or with the process."""

    def __init__(self, *, worker_id: str, lock: Lock, info_file: Path, info: Mapping[str, Any]) -> None:
        self.id = worker_id
        self._lock = lock
        self._info_file = info_file
        self._info = dict(info)

    @property
    def info(self) -> dict[str, Any]:
        """The info that `workers` lists about this worker."""
        return dict(self._info)

    @property
    def in_place(self) -> bool:
        """Whether others can find the lock. They cannot if its folder was replaced."""
        return self._lock.in_place

    def update(self, **info: Any) -> None:
        """Change the info that others see, for instance `status`. Raises StoreError."""
        self._info |= info
        text = json.dumps(self._info, sort_keys=True, default=str)
        try:
            # Not synced, because after a power cut nobody holds the lock.
            write_whole(self._info_file, text.encode(), durable=False)
        except OSError as e:
            raise StoreError(f"{self._info_file}: {e.strerror}; a worker needs to write here") from e

    def release(self) -> None:
        """Release the lock. A second call does nothing."""
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Workers:
    """The worker locks of a state folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

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
            worker_id = f"{slot}-{random_id(8)}"
            known = {
                "pid": os.getpid(),
                "started_at": time.time(),
                "device": "",
                "status": "idle",
                **info,
                "id": worker_id,
            }
            lease = WorkerLease(worker_id=worker_id, lock=lock, info_file=self._info_file(slot), info=known)
            try:
                lease.update()
            except BaseException:
                lease.release()
                raise
            return lease
        raise StoreError(f"{self._folder}: {_MAX_SLOTS} workers hold locks already")

    def alive(self, worker_id: str) -> bool:
        """Whether this worker holds its lock. If its info file cannot be read, it counts as alive."""
        slot = _slot(worker_id)
        if slot is None or not self._held(slot):
            return False
        info = self._read_info(slot)
        return info is None or info.get("id") == worker_id

    def live(self, *roles: str) -> list[WorkerInfo]:
        """The processes that hold locks now; if roles are given, only processes with one of them."""
        infos = []
        for slot in self._slots():
            if self._held(slot):
                info = self._read_info(slot) or {}
                if roles and info.get("role") not in roles:
                    continue
                infos.append(
                    WorkerInfo(
                        id=str(info.get("id", f"{slot}-unknown")),
                        pid=int(info.get("pid", 0)),
                        device=str(info.get("device", "")),
                        started_at=float(info.get("started_at", 0.0)),
                        status=str(info.get("status", "unknown")),
                        info=info,
                    )
                )
        return infos

    def chosen(self, ids: Sequence[str] | None) -> list[WorkerInfo]:
        """The workers with these ids, or all running ones (None). Raises NotFound for a worker that does not run."""
        live = self.live("worker")
        for name in ids or ():
            if all(info.id != name for info in live):
                raise NotFound(f"no worker {name} is running; list workers with: nimble-jobs worker ls")
        return [info for info in live if ids is None or info.id in ids]

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


def _slot(worker_id: str) -> int | None:
    number = worker_id.partition("-")[0]
    return int(number) if number.isascii() and number.isdigit() else None
