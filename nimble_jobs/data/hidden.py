"""The hidden folders beside an output: what a job leaves in them, and their end when the job is over.

.NAME.JOB/           what attempts of the job staged; worthless once the job has ended
.NAME.training/KEY/  checkpoints of a training; after it failed or was cancelled the same training goes on from them
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from nimble_jobs.data import publish
from nimble_jobs.data.files import remove_tree, reported
from nimble_jobs.errors import DataError
from nimble_jobs.job import Job, JobState
from nimble_jobs.spec.paths import CHECKPOINT

_HIDDEN = re.compile(r"\.(.+)\.([^.]+)(?:\.writable)?")  # what `staging_root`, `training_root` and `probe_of` make
STEP, DAMAGED, TEMPORARY = "step-", "damaged-", ".tmp-"  # names in a training's folder


def staging_root(path: Path, job_id: str) -> Path:
    """Where attempts of a job stage what is published at `path`."""
    return path.parent / f".{path.name}.{job_id}"


def training_root(path: Path) -> Path:
    """Where trainings whose output is `path` keep checkpoints."""
    return path.parent / f".{path.name}.training"


def probe_of(path: Path, job_id: str) -> Path:
    """A file that is made and removed to see whether anything can be written."""
    return path.parent / f".{path.name}.{job_id or 'probe'}.writable"


def discard_staging(path: Path, job_id: str) -> None:
    """Removes whatever any attempt of a job staged. For jobs that have ended for good. Raises DataError."""
    root = staging_root(path, job_id)
    with reported(root):
        probe_of(path, job_id).unlink(missing_ok=True)
        if root.exists():
            publish.restore(path, root)
            for staged in root.iterdir():
                publish.remove(staged, job_id)
            with suppress(OSError):  # something of others came in
                root.rmdir()


def tidy(job: Job) -> tuple[str, str] | None:
    """After a job's end: removes what it left beside its output. Does nothing for a job that may run again.

    Returns an event, kind and message: which checkpoints stay, or what could not be removed.
    """
    try:
        kept = _tidy(job)
    except DataError as e:
        return "left-behind", f"what it left beside its output was not removed: {e}"
    if not kept:
        return None
    names = ", ".join(map(str, kept))
    return (
        "checkpoints-kept",
        f"{names} stays: the same training, submitted again, goes on from there; remove it to forget them",
    )


def _tidy(job: Job) -> list[Path]:
    """The folders with checkpoints that another job can go on from."""
    path = output_of(job)
    if path is None or not job.state.final:
        return []
    kept_list = bool(job.spec.get("input", {}).get("only_new"))  # the list of its files, until it is written down
    if job.state is not JobState.SUCCEEDED or kept_list:  # one that succeeded has cleared away all else
        discard_staging(path, job.id)
    kept = _clear_checkpoints(path, job.id) if job.kind == "finetune" else []
    return [] if job.state is JobState.SUCCEEDED else kept


def left(jobs: Iterable[Job]) -> dict[Path, Job]:
    """What is still there of jobs that have ended, unless one that has not ended uses it, too."""
    found: dict[Path, Job] = {}
    used: set[Path] = set()
    for job in jobs:
        path = output_of(job)
        if path is None:
            continue
        own = [staging_root(path, job.id), probe_of(path, job.id)]
        shared = [training_root(path)] if job.kind == "finetune" else []
        if not job.state.final:
            used.update(own, shared)
            continue
        with suppress(OSError):  # a folder that we may not look into
            found.update((place, job) for place in (*own, *shared) if place.exists())
    return {place: job for place, job in sorted(found.items()) if place not in used}


def strays(outputs: Iterable[str]) -> tuple[set[str], set[str]]:
    """What looks like a hidden folder beside one of these outputs: ids of jobs, and outputs of trainings.

    Each folder that holds outputs is read once, however many there are.
    """
    names: dict[str, dict[str, str]] = {}
    for output in outputs:
        parent, _, name = output.rpartition("/")
        names.setdefault(parent or "/", {})[name] = output
    ids: set[str] = set()
    trainings: set[str] = set()
    for parent, here in names.items():
        with suppress(OSError), os.scandir(parent) as entries:
            for entry in entries:
                found = _HIDDEN.fullmatch(entry.name)
                if found is None or found[1] not in here:
                    continue
                if found[2] == "training":
                    trainings.add(here[found[1]])
                else:
                    ids.add(found[2])
    return ids, trainings


def forget_checkpoints(path: Path) -> None:
    """Removes the checkpoints of all trainings whose output is `path`, and nothing else. Raises DataError."""
    root = training_root(path)
    with reported(root):
        for folder in root.glob("*"):
            for name in (f"{STEP}*", f"{DAMAGED}*", f"{TEMPORARY}*"):
                for kept in folder.glob(name):
                    remove_tree(kept)
            with suppress(OSError):  # something of others is in it
                folder.rmdir()
        with suppress(OSError):
            root.rmdir()


def output_of(job: Job) -> Path | None:
    """Where the job publishes; None where the stored spec is damaged."""
    output = job.spec.get("output")
    path = output.get("path") if isinstance(output, dict) else None
    return Path(path) if isinstance(path, str) else None


def _clear_checkpoints(path: Path, job_id: str) -> list[Path]:
    """Removes what the job left half written, or keeps to itself (`resume: never`), and what holds no checkpoint.

    Returns the folders that hold one.
    """
    root, kept = training_root(path), []
    with reported(root):
        for folder in sorted(root.glob("*")):
            if folder.name.endswith(f"-{job_id}"):
                remove_tree(folder)
                continue
            for half in folder.glob(f"{TEMPORARY}{job_id}-*"):
                remove_tree(half)
            if any(folder.glob(f"{STEP}*/{CHECKPOINT}")):
                kept.append(folder)
            elif not any(folder.glob(f"{TEMPORARY}*")):  # of a job that is at work there
                for damaged in folder.glob(f"{DAMAGED}*"):
                    remove_tree(damaged)
                with suppress(OSError):
                    folder.rmdir()
        with suppress(OSError):
            root.rmdir()
    return kept
