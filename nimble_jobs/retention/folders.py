"""Finds hidden folders beside outputs, and records of publications, that are no longer needed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from nimble_jobs.addresses import is_address
from nimble_jobs.data import hidden, publish
from nimble_jobs.data.object_manifest import Manifests
from nimble_jobs.errors import NimbleError
from nimble_jobs.job import Job, JobState
from nimble_jobs.objects import Objects
from nimble_jobs.store.expiry import Ended, Published

if TYPE_CHECKING:
    from nimble_jobs.store import Store

GRACE_S = 60.0  # a job that ended just now may still be tidied up by its worker


def left_over(store: Store) -> dict[Path, Job]:
    """Hidden folders and files of ended jobs, with their jobs. Reads only jobs that left some."""
    ids, trainings = hidden.strays(store.expiry.outputs())
    if not ids and not trainings:
        return {}
    return hidden.left(store.jobs.of(ids=ids, trainings=trainings))


def output_of(job: Job) -> Path:
    """The output path of a job that left files, so it has one."""
    path = hidden.output_of(job)
    assert path is not None
    return path


def bytes_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder; unreadable ones count as 0."""
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            total += _size(os.path.join(folder, name))  # noqa: PTH118  # os.walk gives texts
    return total if path.is_dir() and not path.is_symlink() else _size(path)


def _size(path: str | Path) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def keep_publications(store: Store, jobs: Sequence[Ended]) -> dict[str, str]:
    """Record what jobs published that then did not succeed. Only the secrets of their attempts vouch for
    those outputs, and they go with the jobs. Returns, by job, why it must stay: an object store could not tell.
    """
    troubles = {}
    for job in jobs:
        try:
            _keep_publication(store, job)
        except NimbleError as e:
            troubles[job.id] = f"job {job.id} stays: {e}"
    return troubles


def _keep_publication(store: Store, job: Ended) -> None:
    if job.state is JobState.SUCCEEDED or not job.attempt or job.output is None:
        return
    there: publish.Found | None = None
    if is_address(job.output):
        there = Manifests(Objects(job.output), store.publications).find()[0]
    else:
        with suppress(OSError):  # it was moved away meanwhile
            there = publish.find(Path(job.output), store.publications)
    if there is not None and there.is_of(job.id) and there.publication is not None:
        store.publications.keep(there.publication)


def gone(published: Published, *, replaced: bool) -> bool:
    """Whether a published folder is gone for good. `replaced`: a later publication has its path.

    It is not if its disk is unmounted: then the nearest existing parent is on another device.
    """
    device, _, inode = published.folder.partition(":")
    path = Path(published.path)
    try:
        info = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return _above(path, device)
    except OSError:
        return False
    return replaced and (str(info.st_dev), str(info.st_ino)) != (device, inode)


def _above(path: Path, device: str) -> bool:
    """Whether the nearest existing parent is on this device."""
    for parent in path.parents:
        try:
            return str(parent.stat().st_dev) == device
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return False
    return False


def latest(publications: Iterable[Published]) -> dict[str, float]:
    """The time of each path's last publication."""
    times: dict[str, float] = {}
    for each in publications:
        times[each.path] = max(each.at, times.get(each.path, each.at))
    return times
