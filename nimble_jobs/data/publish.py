"""The one step that makes output visible, and what is made of a path that is taken already."""

from __future__ import annotations

import dataclasses
import errno
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nimble_jobs.data.files import exchange, sync_folder
from nimble_jobs.errors import OutputExists
from nimble_jobs.regular import read_regular
from nimble_jobs.spec.model import OutputSpec

MANIFEST = "manifest.json"
_MADE_BY = "nimble-jobs"
_TRIES = 16  # each after somebody else put something there in the meantime


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One published file."""

    name: str
    sha256: str
    bytes: int
    records: int | None  # None for a file that holds no records


def manifest(
    *,
    job_id: str,
    attempt: int,
    basis: str,
    entries: Sequence[FileEntry],
    records: int,
    bad: int,
    summary: dict[str, Any],
) -> dict[str, Any]:
    """What `manifest.json` says."""
    return {
        "made_by": _MADE_BY,
        "version": 1,
        "job_id": job_id,
        "attempt": attempt,
        "basis": basis,
        "records": records,
        "bad": bad,
        "files": [dataclasses.asdict(e) for e in entries],
        "summary": summary,
    }


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of a published folder; None if this is not one."""
    try:
        raw = json.loads(read_regular(path / MANIFEST))
    except (OSError, ValueError):
        return None
    return raw if isinstance(raw, dict) and raw.get("made_by") == _MADE_BY else None


def outputs(path: Path, held: dict[str, Any]) -> dict[str, Any]:
    """What a job says of its output."""
    return {
        "path": str(path),
        "files": [f["name"] for f in held["files"]] + [MANIFEST],
        "records": held["records"],
        "bad": held["bad"],
        "bytes": sum(f["bytes"] for f in held["files"]),
    }


def adoptable(output: OutputSpec, job_id: str, basis: str) -> dict[str, Any] | None:
    """Outputs of the folder that is there, if this job published it (and died before it could say so), or, under
    `if_exists: resume`, if it was made from the same basis."""
    held = read_manifest(output.path)
    if held is None:
        return None
    same = output.if_exists == "resume" and basis != "" and held.get("basis") == basis
    return outputs(output.path, held) if held.get("job_id") == job_id or same else None


def check_free(output: OutputSpec, job_id: str) -> None:
    """Raises OutputExists when `if_exists` forbids to publish over what is there."""
    path = output.path
    if not (path.exists() or path.is_symlink()):
        return
    if path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
        return
    held = read_manifest(path)
    if held is not None and held.get("job_id") == job_id:
        return
    if output.if_exists == "fail":
        raise OutputExists(f"{path}: exists already; expected a free output.path, or output.if_exists: replace")
    if output.if_exists == "replace" and held is None:
        raise OutputExists(
            f"{path}: was not published by nimble-jobs, so it is not replaced; expected a free output.path"
        )
    if output.if_exists == "resume":
        raise OutputExists(f"{path}: holds the output of something else; expected a free output.path")


def publish(output: OutputSpec, folder: Path, held: dict[str, Any]) -> dict[str, Any]:
    """Moves a complete, synced folder to the output path. Raises OutputExists."""
    path = output.path
    for _ in range(_TRIES):
        found = adoptable(output, held["job_id"], held["basis"])
        if found is not None:  # another attempt of this job was faster
            return found
        check_free(output, held["job_id"])
        try:
            folder.rename(path)  # over nothing, or over an empty folder
            break
        except OSError as e:
            if e.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        if output.if_exists == "replace" and read_manifest(path) is not None and _swap(path, folder):
            break
    else:
        raise OutputExists(f"{path}: others keep writing to it; expected a free output.path")
    sync_folder(path.parent)
    sync_folder(folder.parent)
    return outputs(path, held)


def _swap(path: Path, folder: Path) -> bool:
    """Puts `folder` in the place of `path` without a moment in which neither is there, where the system can."""
    if exchange(folder, path):
        return True
    path.rename(folder.with_name(folder.name.replace("attempt", "old")))
    return False  # the place is free now: the loop renames into it


def restore(path: Path, root: Path) -> None:
    """Puts back a folder that a two-step replacement moved away, if nothing took its place."""
    for old in sorted(root.glob("old-*")):
        if not path.exists():
            old.rename(path)
            sync_folder(path.parent)
