"""The state folder: chooses it, and checks that only its owner can write to it and that its database is there."""

from __future__ import annotations

import json
import os
import secrets
import stat
import time
from pathlib import Path

from nimble_jobs.errors import HomeReplaced, StateFolderRefused, StoreError, StoreGone, StoreTrouble
from nimble_jobs.settings import choose
from nimble_jobs.store.locks import exclusive
from nimble_jobs.whole import write_whole

DATABASE = "nimble-jobs.db"
MARKER = "home.json"  # marks a folder with a complete database
NAMED = "folder.json"  # the id of a folder whose database is elsewhere
FORMAT = 1
_FOLDERS = ("artifacts", "builds", "logs", "workers")


def resolve(home: str | None = None) -> Path:
    """Choose the state folder and make it, mode 0700, with its subfolders.

    Raises StateFolderRefused if others own it or can write to it, StoreError if it cannot be used.
    """
    path = choose(home)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = path.resolve()
        guard(path)
        for name in _FOLDERS:
            folder = path / name
            folder.mkdir(mode=0o700, exist_ok=True)
            guard(folder)
    except StoreError:
        raise
    except FileExistsError as e:
        raise StoreError(f"state folder {e.filename} is not a folder; choose another with --home") from e
    except OSError as e:
        raise StoreError(f"state folder {path}: {e.strerror}; choose another with --home or NIMBLE_JOBS_HOME") from e
    return path


def guard(folder: Path) -> None:
    """Refuse a folder that others own or can write to, and remove others' permission to read it.

    Compiled artifacts are code: anyone who can write here can run code as this user.
    """
    info = folder.stat()
    mode = stat.S_IMODE(info.st_mode)
    if info.st_uid != os.geteuid():
        raise StateFolderRefused(
            f"state folder {folder} belongs to user {info.st_uid}, not to {os.geteuid()}; choose another with --home"
        )
    if mode & 0o022:
        raise StateFolderRefused(
            f"state folder {folder}: others can write to it (mode {mode:04o}); "
            f"check its contents, then run `chmod 700 {folder}`, or choose another with --home"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StoreTrouble(f"state folder {folder} is read-only; choose another with --home or NIMBLE_JOBS_HOME")
    if mode & 0o077:
        folder.chmod(0o700)


def initialised(home: Path) -> bool:
    """Whether the marker says that the database was complete once. Raises StoreError for another format."""
    return identity(home) is not None


def identity(home: Path) -> str | None:
    """The id that this state folder shares with its backups only; None before its database is complete.

    Folders of the first versions have no id, but the time of their creation instead. Raises StoreError.
    """
    try:
        marker = json.loads((home / MARKER).read_text())
        value = marker["format"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise StoreError(f"{home / MARKER}: cannot be read ({e}); expected {{'format': {FORMAT}}}") from e
    if value != FORMAT:
        raise StoreError(
            f"{home / MARKER}: format {value}; expected {FORMAT}: use the nimble-jobs that made this folder"
        )
    return str(marker.get("id") or marker.get("created_at") or "")


def mark(home: Path) -> None:
    """Write the marker durably once the database is complete. A marker from another process stays."""
    with exclusive(home / "builds" / "home.lock", poll_s=0.01):
        if not initialised(home):
            given = folder_id(home) or secrets.token_hex(8)
            marker = {"format": FORMAT, "created_at": time.time(), "id": given}
            write_whole(home / MARKER, json.dumps(marker).encode())


def folder_id(home: Path) -> str | None:
    """The id of this state folder, wherever its database is; None if it has none yet. Raises StoreError."""
    try:
        return str(json.loads((home / NAMED).read_text())["id"])
    except FileNotFoundError:
        return identity(home)
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise StoreError(f"{home / NAMED}: cannot be read ({e}); expected {{'id': ID}}") from e


def named(home: Path) -> str:
    """The folder's id, which a folder without a database of its own gets here. Raises StoreError."""
    with exclusive(home / "builds" / "home.lock", poll_s=0.01):
        known = folder_id(home) or secrets.token_hex(8)
        if not (home / NAMED).exists():
            write_whole(home / NAMED, json.dumps({"id": known}).encode())
    return known


def vouch(home: Path, known: str | None) -> None:
    """Make sure that this is still the opened state folder, with a database in it.

    Raises StoreGone if the folder or its marker is missing, HomeReplaced if it is another folder, StoreError.
    """
    try:
        current = identity(home)
    except StoreError as e:
        raise StoreTrouble(f"{e}; waiting until it is mended") from e
    if current is None:
        raise StoreGone(f"{home}: the state folder is gone, or has no {MARKER}; put it back to continue")
    if known is not None and current != known:
        raise HomeReplaced(
            f"{home}: the state folder was replaced by another one (id {current}, was {known}); stop the "
            "processes that still use the old one"
        )
    check_database(home)


def check_database(home: Path) -> None:
    """Make sure that SQLite does not create an empty database in place of a missing one. Raises StoreError.

    The marker is read first, because another process may be initialising the folder and writes the marker last.
    """
    marked = initialised(home)
    database = home / DATABASE
    try:
        size = database.stat().st_size
    except FileNotFoundError:
        size = -1
    if marked and size <= 0:
        what = "is missing" if size < 0 else "is empty (0 bytes)"
        raise StoreError(
            f"{database}: {what}, though this state folder was initialised; restore a backup, "
            f"or remove {home / MARKER} to start over without its jobs and schedules"
        )
    if size < 0:
        os.close(os.open(database, os.O_CREAT | os.O_RDWR, 0o600))  # SQLite would use the umask's mode
