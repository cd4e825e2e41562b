"""Publishes output in one step, and decides what to do if the output path is taken.

An existing folder at the output path is replaced, or recognised as this job's own, only if the store knows its
manifest: the store records the manifest's SHA-256 and the folder's inode under a random token before publication.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nimble_jobs.data.files import exchange, remove_tree
from nimble_jobs.errors import DataError, OutputExists
from nimble_jobs.job import Publication
from nimble_jobs.plural import count
from nimble_jobs.regular import read_regular
from nimble_jobs.spec.model import OutputSpec
from nimble_jobs.spec.places import about_home
from nimble_jobs.whole import sync_path

MANIFEST = "manifest.json"
MADE_BY = "nimble-jobs"
_TRIES = 16  # tries, each after somebody else put something there
_NAMED = 3  # foreign files named in a message


class Ledger(Protocol):
    """The store's record of publications."""

    home: Path  # the state folder; nothing may be published in or around it

    def note(self, publication: Publication, attempt: int) -> None:
        """Record it durably. Raises FencedOut if another attempt owns the job."""

    def find(self, token: str) -> Publication | None: ...

    def outputs(self, job_id: str) -> dict[str, Any] | None:
        """The outputs of a job from before publications were recorded."""


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One published file."""

    name: str
    sha256: str
    bytes: int
    records: int | None  # None for a file without records


@dataclass(frozen=True, kw_only=True)
class Found:
    """The manifest in a folder, and why the store does not accept it as its own; None if it does."""

    manifest: dict[str, Any]
    doubt: str | None

    @property
    def job_id(self) -> str:
        return str(self.manifest.get("job_id"))


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
    """The contents of `manifest.json`, with a fresh token."""
    return {
        "made_by": MADE_BY,
        "version": 1,
        "token": secrets.token_hex(16),
        "job_id": job_id,
        "attempt": attempt,
        "basis": basis,
        "records": records,
        "bad": bad,
        "files": [{**vars(e)} for e in entries],
        "summary": summary,
    }


def find(path: Path, ledger: Ledger, folder: Path | None = None) -> Found | None:
    """The manifest of the folder at `path`, which may have been moved to `folder`; None if it has none."""
    folder = folder or path
    try:
        raw = read_regular(folder / MANIFEST)
        contents = json.loads(raw)
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(contents, dict) or contents.get("made_by") != MADE_BY:
        return None
    return Found(manifest=contents, doubt=_doubt(path, folder, contents, hashlib.sha256(raw).hexdigest(), ledger))


def _doubt(path: Path, folder: Path, said: dict[str, Any], digest: str, ledger: Ledger) -> str | None:
    token, job_id = said.get("token"), said.get("job_id")
    unknown = (
        f"its {MANIFEST} names job {job_id}, but the state folder {ledger.home} has "
        "no record that this job published it"
    )
    if token is None:  # from an earlier version
        known_outputs = ledger.outputs(job_id) if isinstance(job_id, str) else None
        return None if known_outputs is not None and _says(said, path) == _of(known_outputs) else unknown
    known = ledger.find(token) if isinstance(token, str) else None
    if known is None:
        return unknown
    if known.manifest_sha256 != digest:
        return f"its {MANIFEST} was changed after job {known.job_id} published it"
    device, _, inode = folder_id(folder).partition(":")
    moved = known.path != _resolved(path)
    if known.folder.partition(":")[2] != inode or (moved and known.folder.partition(":")[0] != device):
        return f"its {MANIFEST} belongs to another folder, which job {known.job_id} published at {known.path}"
    return None


def _says(said: dict[str, Any], path: Path) -> dict[str, Any] | None:
    try:
        return _of(outputs(path, said))
    except (KeyError, TypeError):
        return None


def _of(given: dict[str, Any]) -> dict[str, Any]:
    return {**given, "path": _resolved(Path(str(given.get("path"))))}


def folder_id(path: Path) -> str:
    """DEVICE:INODE of a folder. A rename keeps them, a copy does not."""
    info = path.stat()
    return f"{info.st_dev}:{info.st_ino}"


def _resolved(path: Path) -> str:
    return str(Path(os.path.realpath(path.parent)) / path.name)


def publication(output: OutputSpec, folder: Path, said: dict[str, Any], raw: bytes) -> Publication:
    """The store's record of a complete folder with manifest `raw`, made before it is published."""
    return Publication(
        token=said["token"],
        job_id=said["job_id"],
        path=_resolved(output.folder),
        folder=folder_id(folder),
        manifest_sha256=hashlib.sha256(raw).hexdigest(),
    )


def outputs(path: Path | str, held: dict[str, Any]) -> dict[str, Any]:
    """The facts about its output that a job reports."""
    return {
        "path": str(path),
        "files": [f["name"] for f in held["files"]] + [MANIFEST],
        "records": held["records"],
        "bad": held["bad"],
        "bytes": sum(f["bytes"] for f in held["files"]),
    }


def published(path: Path, job_id: str, ledger: Ledger) -> dict[str, Any] | None:
    """The manifest of the existing folder, if this job published it; else None."""
    existing = find(path, ledger)
    return existing.manifest if existing is not None and existing.doubt is None and existing.job_id == job_id else None


def adoptable(output: OutputSpec, job_id: str, basis: str, ledger: Ledger) -> dict[str, Any] | None:
    """Outputs of the existing folder, if this job published it and died before it recorded that, or, under
    `if_exists: resume`, if it was made from the same basis."""
    existing = find(output.folder, ledger)
    if existing is None or existing.doubt is not None:
        return None
    same = output.if_exists == "resume" and basis != "" and existing.manifest.get("basis") == basis
    return outputs(output.folder, existing.manifest) if existing.job_id == job_id or same else None


def check_apart(output: OutputSpec, ledger: Ledger) -> None:
    """Raises DataError for an output path in or around the state folder."""
    if problem := about_home(output.folder, ledger.home):
        raise DataError(f"output.path: {output.folder} {problem}; expected a folder of its own")


def check_free(output: OutputSpec, job_id: str, ledger: Ledger) -> None:
    """Raises OutputExists if `if_exists` forbids publishing over the existing folder."""
    path = output.folder
    if path.is_symlink():
        raise OutputExists(f"{path} is a symbolic link; choose another output.path")
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    existing = find(path, ledger)
    if existing is not None and existing.doubt is None and existing.job_id == job_id:
        return
    match output.if_exists:
        case "fail":
            raise OutputExists(f"{path} exists already; choose another output.path, or set output.if_exists: replace")
        case "resume":
            why = f" ({existing.doubt})" if existing is not None and existing.doubt is not None else ""
            raise OutputExists(f"{path} holds the output of another job{why}; choose another output.path")
        case _:
            if refusal := _why_kept(path, existing):
                raise OutputExists(f"{path}: {refusal}")


def _why_kept(path: Path, found: Found | None) -> str | None:
    """Why `replace` must leave a folder alone; None if it holds only our own files."""
    trusted = found is not None and found.doubt is None
    return why_kept(found, _of_others(path, found.manifest) if found is not None and trusted else [])


def why_kept(found: Found | None, others: Sequence[str]) -> str | None:
    """Why `replace` must leave an output alone, which holds `others` beside what its manifest names; None if it may."""
    if found is None:
        return "was not published by nimble-jobs, so it is not replaced; choose another output.path"
    if found.doubt is not None:
        return f"is not replaced: {found.doubt}; remove the folder yourself, or choose another output.path"
    if not others:
        return None
    more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
    return (
        f"is not replaced: it holds {count(len(others), 'file')} that job "
        f"{found.job_id} did not publish, or that have changed since: {', '.join(others[:_NAMED])}{more}; "
        "move the files to keep, "
        "or choose another output.path"
    )


def _of_others(path: Path, said: dict[str, Any]) -> list[str]:
    """Files in a published folder that differ from its manifest in name, kind or size."""
    sizes = {str(f["name"]): f["bytes"] for f in said["files"]}
    others = []
    with os.scandir(path) as entries:
        for entry in sorted(entries, key=lambda e: e.name):
            if entry.name not in sizes and entry.name != MANIFEST:
                others.append(f"{entry.name}/" if entry.is_dir(follow_symlinks=False) else entry.name)
            elif not entry.is_file(follow_symlinks=False):
                others.append(f"{entry.name} (no longer a file)")
            elif entry.name != MANIFEST and entry.stat(follow_symlinks=False).st_size != sizes[entry.name]:
                others.append(f"{entry.name} (changed)")
    return others


def publish(output: OutputSpec, folder: Path, held: dict[str, Any], ledger: Ledger) -> dict[str, Any]:
    """Move a complete, synced folder, which the ledger has recorded, to the output path. Raises OutputExists."""
    path = output.folder
    for _ in range(_TRIES):
        adopted = adoptable(output, held["job_id"], held["basis"], ledger)
        if adopted is not None:  # another attempt of this job was first
            return adopted
        check_free(output, held["job_id"], ledger)
        try:
            folder.rename(path)  # onto a free path or an empty folder
            break
        except OSError as e:
            if e.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        if output.if_exists == "replace" and _swap(path, folder, ledger):
            break
    else:
        raise OutputExists(f"{path}: other processes keep writing to it; choose another output.path")
    sync_path(path.parent)  # a rename is one step on the disk too, so the old place needs no sync
    return outputs(path, held)


def _swap(path: Path, folder: Path, ledger: Ledger) -> bool:
    """Replace `path` by `folder`, without a moment in which neither exists, if the system can.

    If files came into the old folder meanwhile, they are noticed in its new place, and everything is put back.
    """
    old = folder.with_name(folder.name.replace("attempt", "old"))
    if exchange(folder, path):
        if _why_kept(folder, find(path, ledger, folder)) is not None:
            exchange(folder, path)
            return False
        folder.rename(old)
        return True
    path.rename(old)
    if _why_kept(old, find(path, ledger, old)) is not None:
        old.rename(path)
    return False  # the place is free now, and the loop renames into it


def restore(path: Path, root: Path) -> None:
    """Put back a folder that a two-step replacement moved away, if nothing took its place."""
    for old in sorted(root.glob("old-*")):
        if not path.exists():
            old.rename(path)
            sync_path(path.parent)


def remove(folder: Path, job_id: str) -> None:
    """Remove an attempt's staging folder, or a replaced output; of the latter only the files in its manifest.

    A file that came in at the last moment stays, with its folder.
    """
    try:
        contents = json.loads(read_regular(folder / MANIFEST))
        theirs = contents["job_id"] != job_id
        names = [str(f["name"]) for f in contents["files"]] if theirs else []
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        theirs, names = False, []
    if not theirs or folder.is_symlink():
        remove_tree(folder)
        return
    for name in (*names, MANIFEST):  # the manifest last
        if Path(name).name == name:
            (folder / name).unlink(missing_ok=True)
    try:
        folder.rmdir()
    except OSError as e:
        if e.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise
