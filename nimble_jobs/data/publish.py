"""Publishes output in one step, and decides what to do if the output path is taken.

An existing folder at the output path is replaced, or recognised as this job's own, only if the store knows its
manifest. The end of a job records the manifest's SHA-256 and the folder's inode under the manifest's token. Until then,
and if the job never ends so, the token itself is the proof: only an attempt of this store can have made it (`seals`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nimble_jobs.data.files import exchange, remove_tree
from nimble_jobs.data.seals import Ledger, is_job_id, known, resolved
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
    publication: Publication | None = None  # None if it is not trusted, or from a version without tokens

    @property
    def job_id(self) -> str:
        return str(self.manifest.get("job_id"))

    def is_of(self, job_id: str) -> bool:
        """Whether the store accepts that this job published it."""
        return self.doubt is None and self.job_id == job_id


def manifest(
    *,
    job_id: str,
    attempt: int,
    basis: str,
    entries: Sequence[FileEntry],
    records: int,
    bad: int,
    summary: dict[str, Any],
    folder: str,
) -> dict[str, Any]:
    """The contents of `manifest.json`, but for its token. `folder`: DEVICE:INODE; empty in an object store."""
    return {
        "made_by": MADE_BY,
        "version": 1,
        "job_id": job_id,
        "attempt": attempt,
        "folder": folder,
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
    publication = known(contents, raw, ledger)
    if publication is not None:
        doubt = changed(publication, raw) or _elsewhere(publication, path, folder)
    elif contents.get("token") is None and _known_before(contents, path, ledger):
        doubt = None
    else:
        doubt = unknown(contents, ledger)
    return Found(manifest=contents, doubt=doubt, publication=publication)


def unknown(contents: dict[str, Any], ledger: Ledger) -> str:
    """Why a manifest is not trusted that the store does not know."""
    return (
        f"its {MANIFEST} names job {contents.get('job_id')}, but the state folder {ledger.home} has "
        "no record that this job published it"
    )


def changed(publication: Publication, raw: bytes) -> str | None:
    """Why a manifest is not trusted that was changed; None if it was not."""
    if publication.manifest_sha256 == hashlib.sha256(raw).hexdigest():
        return None
    return f"its {MANIFEST} was changed after job {publication.job_id} published it"


def _known_before(contents: dict[str, Any], path: Path, ledger: Ledger) -> bool:
    """Whether a job of a version whose manifests had no token published it."""
    job_id = contents.get("job_id")
    known_outputs = ledger.outputs(str(job_id)) if is_job_id(job_id) else None
    return known_outputs is not None and _says(contents, path) == _of(known_outputs)


def _elsewhere(publication: Publication, path: Path, folder: Path) -> str | None:
    """Why a known manifest is not trusted in this folder; None if it was published there."""
    device, _, inode = folder_id(folder).partition(":")
    its_device, _, its_inode = publication.folder.partition(":")
    moved = publication.path != resolved(path)
    if its_inode == inode and (its_device == device or not moved):
        return None
    return f"its {MANIFEST} belongs to another folder, which job {publication.job_id} published at {publication.path}"


def _says(said: dict[str, Any], path: Path) -> dict[str, Any] | None:
    try:
        return _of(outputs(path, said))
    except (KeyError, TypeError):
        return None


def _of(given: dict[str, Any]) -> dict[str, Any]:
    return {**given, "path": resolved(Path(str(given.get("path"))))}


def folder_id(path: Path) -> str:
    """DEVICE:INODE of a folder. A rename keeps them, a copy does not."""
    info = path.stat()
    return f"{info.st_dev}:{info.st_ino}"


def complete(path: str, said: dict[str, Any], raw: bytes) -> Found:
    """What is about to be published at `path` with the sealed manifest `raw`, whose contents are `said`."""
    publication = Publication(
        token=said["token"],
        job_id=said["job_id"],
        path=path,
        folder=said["folder"],
        manifest_sha256=hashlib.sha256(raw).hexdigest(),
    )
    return Found(manifest=said, doubt=None, publication=publication)


def outputs(path: Path | str, held: dict[str, Any]) -> dict[str, Any]:
    """The facts about its output that a job reports."""
    not_finite = held.get("not_finite")
    return {
        "path": str(path),
        "files": [f["name"] for f in held["files"]] + [MANIFEST],
        "records": held["records"],
        "bad": held["bad"],
        "bytes": sum(f["bytes"] for f in held["files"]),
    } | ({"not_finite": not_finite} if not_finite else {})


def published(path: Path, job_id: str, ledger: Ledger) -> Found | None:
    """The existing folder, if this job published it; else None."""
    existing = find(path, ledger)
    return existing if existing is not None and existing.is_of(job_id) else None


def adoptable(output: OutputSpec, job_id: str, basis: str, ledger: Ledger) -> Found | None:
    """The existing folder, if this job published it and died before it recorded that, or, under `if_exists: resume`,
    if it was made from the same basis."""
    existing = find(output.folder, ledger)
    if existing is None or existing.doubt is not None:
        return None
    same = output.if_exists == "resume" and basis != "" and existing.manifest.get("basis") == basis
    return existing if existing.job_id == job_id or same else None


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
    if existing is not None and existing.is_of(job_id):
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


def publish(output: OutputSpec, folder: Path, held: Found, ledger: Ledger) -> Found:
    """Move a complete, synced folder to the output path. Returns what is there then. Raises OutputExists."""
    path, job_id = output.folder, held.job_id
    for _ in range(_TRIES):
        adopted = adoptable(output, job_id, held.manifest["basis"], ledger)
        if adopted is not None:  # another attempt of this job was first
            return adopted
        check_free(output, job_id, ledger)
        try:
            folder.rename(path)  # onto a free path or an empty folder
            break
        except OSError as e:
            if e.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        if output.if_exists == "replace" and _swap(path, folder, ledger, job_id):
            break
    else:
        raise OutputExists(f"{path}: other processes keep writing to it; choose another output.path")
    sync_path(path.parent)  # a rename is one step on the disk too, so the old place needs no sync
    return held


def _swap(path: Path, folder: Path, ledger: Ledger, job_id: str) -> bool:
    """Replace `path` by `folder`, without a moment in which neither exists, if the system can.

    If files came into the old folder meanwhile, they are noticed in its new place, and everything is put back. So it is
    if another attempt of this job has published meanwhile: the loop then takes what that has published.
    """
    old = folder.with_name(folder.name.replace("attempt", "old"))
    if exchange(folder, path):
        if _stays(path, folder, ledger, job_id):
            exchange(folder, path)
            return False
        folder.rename(old)
        return True
    path.rename(old)
    if _stays(path, old, ledger, job_id):
        old.rename(path)
    return False  # the place is free now, and the loop renames into it


def _stays(path: Path, moved: Path, ledger: Ledger, job_id: str) -> bool:
    """Whether what was at `path`, and was moved, must be put back."""
    found = find(path, ledger, moved)
    return (found is not None and found.is_of(job_id)) or _why_kept(moved, found) is not None


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
