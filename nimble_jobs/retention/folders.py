"""Finds hidden folders beside outputs, and records of publications, that are no longer needed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from nimble_jobs.addresses import is_address
from nimble_jobs.data import hidden, publish
from nimble_jobs.job import Job, JobState
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


def keep_publication(store: Store, job: Ended) -> None:
    """Record the folder that a job published if the job then ended otherwise than by success: only the secrets of its
    attempts vouch for that folder, and they go with the job.
    """
    if job.state is JobState.SUCCEEDED or not job.attempt or job.output is None or is_address(job.output):
        return
    with suppress(OSError):  # it was moved away meanwhile
        there = publish.published(Path(job.output), job.id, store.publications)
        if there is not None and there.publication is not None:
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
