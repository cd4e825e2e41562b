"""Folders of test runs that were killed, with no chance to remove what they had made."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_FOLDERS = ("nimble-jobs-postgres-*", "nimble-jobs-prefork-*", "nimble-jobs-tests-*")  # `*` begins with a process id
_OLD_S = 3 * 3600.0  # no run takes that long; process ids of other containers say nothing here


def sweep(*places: Path) -> None:
    """Remove this user's old folders in `places` whose run has ended; by default where test runs make them."""
    for place in places or (Path(tempfile.gettempdir()), Path("/dev/shm")):  # where scripts/test has them
        for folder in (found for pattern in _FOLDERS for found in place.glob(pattern)):
            with suppress(OSError):  # another run has removed it
                about = folder.lstat()
                old = time.time() - about.st_mtime > _OLD_S
                if old and folder.is_dir() and _owned(about.st_uid) and not _alive(folder.name.split("-")[3]):
                    shutil.rmtree(folder, ignore_errors=True)


def _owned(user: int) -> bool:
    return os.geteuid() in (0, user)  # PostgreSQL's folder belongs to nobody where root runs the tests


def _alive(number: str) -> bool:
    return not number.isdigit() or Path("/proc", number).exists()
