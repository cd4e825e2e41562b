"""The hidden folders beside an output, and their removal when the job is over.

.NAME.JOB/           files staged by the job's attempts; useless once the job has ended
.NAME.training/KEY/  checkpoints, from which a failed or cancelled training can resume
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from nimble_jobs.addresses import is_address
from nimble_jobs.data import fetched, publish
from nimble_jobs.data.files import remove_tree, reported
from nimble_jobs.data.object_runs import discard_objects
from nimble_jobs.errors import DataError, ObjectTrouble
from nimble_jobs.job import Job, JobState
from nimble_jobs.spec.paths import CHECKPOINT

_HIDDEN = re.compile(r"\.(.+)\.([^.]+)(?:\.writable)?")  # names made by `staging_root`, `training_root` and `probe_of`
STEP, DAMAGED, TEMPORARY = "step-", "damaged-", ".tmp-"  # names in a training's folder


def staging_root(path: Path, job_id: str) -> Path:
    """The folder in which a job's attempts stage the output of `path`."""
    return path.parent / f".{path.name}.{job_id}"


def training_root(path: Path) -> Path:
    """The folder for checkpoints of trainings whose output is `path`."""
    return path.parent / f".{path.name}.training"


def probe_of(path: Path, job_id: str) -> Path:
    """The name of a file that is written and removed to test whether the place is writable."""
    return path.parent / f".{path.name}.{job_id or 'probe'}.writable"


def discard_staging(path: Path, job_id: str) -> None:
    """Remove everything that a job's attempts staged. For jobs that have ended for good. Raises DataError."""
    root = staging_root(path, job_id)
    with reported(root):
        probe_of(path, job_id).unlink(missing_ok=True)
        if root.exists():
            publish.restore(path, root)
            for staged in root.iterdir():
                publish.remove(staged, job_id)
            with suppress(OSError):  # somebody added other files
                root.rmdir()


def tidy(job: Job, home: Path) -> tuple[str, str] | None:
    """Remove what an ended job left beside its output, and its copies of inputs in the state folder `home`. Does
    nothing for a job that may run again.

    Returns an event (kind and message) about checkpoints that stay, or files that could not be removed.
    """
    try:
        if job.state.final:
            fetched.forget(home, job.id)
        kept = _tidy(job)
    except (DataError, ObjectTrouble) as e:
        return "left-behind", f"its files beside the output could not be removed: {e}"
    if not kept:
        return None
    names = ", ".join(map(str, kept))
    return (
        "checkpoints-kept",
        f"{names} is kept: the same training, submitted again, resumes from it; remove the folder to start over",
    )


def _tidy(job: Job) -> list[Path]:
    """Tidy up; returns the folders with checkpoints from which another job can resume."""
    address = address_of(job)
    if address is not None and job.state.final and job.state is not JobState.SUCCEEDED:
        discard_objects(address, job.id)
    path = output_of(job)
    if path is None or not job.state.final:
        return []
    kept_list = bool(job.spec.get("input", {}).get("only_new"))  # the list of files, before it gets its final name
    if job.state is not JobState.SUCCEEDED or kept_list:  # a succeeded job has removed everything else
        discard_staging(path, job.id)
    kept = _clear_checkpoints(path, job.id) if job.kind == "finetune" else []
    return [] if job.state is JobState.SUCCEEDED else kept


def left(jobs: Iterable[Job]) -> dict[Path, Job]:
    """Leftovers of ended jobs, except those that an unfinished job uses too."""
    leftovers: dict[Path, Job] = {}
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
        with suppress(OSError):  # a folder that we may not read
            leftovers.update((place, job) for place in (*own, *shared) if place.exists())
    return {place: job for place, job in sorted(leftovers.items()) if place not in used}


def strays(outputs: Iterable[str]) -> tuple[set[str], set[str]]:
    """Hidden folders beside these outputs, as ids of jobs and outputs of trainings.

    Each parent folder is read once, for any number of outputs.
    """
    names: dict[str, dict[str, str]] = {}
    for output in outputs:
        if is_address(output):
            continue
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
    """Remove the checkpoints of all trainings whose output is `path`, and nothing else. Raises DataError."""
    root = training_root(path)
    with reported(root):
        for folder in root.glob("*"):
            for name in (f"{STEP}*", f"{DAMAGED}*", f"{TEMPORARY}*"):
                for kept in folder.glob(name):
                    remove_tree(kept)
            with suppress(OSError):  # it holds other files too
                folder.rmdir()
        with suppress(OSError):
            root.rmdir()


def output_of(job: Job) -> Path | None:
    """The folder of the job's output; None if that is in an object store, or the stored spec is damaged."""
    path = _output_of(job)
    return None if path is None or is_address(path) else Path(path)


def address_of(job: Job) -> str | None:
    """The address of the job's output; None if that is a folder, or the stored spec is damaged."""
    path = _output_of(job)
    return path if path is not None and is_address(path) else None


def _output_of(job: Job) -> str | None:
    output = job.spec.get("output")
    path = output.get("path") if isinstance(output, dict) else None
    return path if isinstance(path, str) else None


def _clear_checkpoints(path: Path, job_id: str) -> list[Path]:
    """Remove incomplete checkpoints, private ones (`resume: never`), and folders without a checkpoint.

    Returns the folders with a checkpoint.
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
            elif not any(folder.glob(f"{TEMPORARY}*")):  # a running job uses it
                for damaged in folder.glob(f"{DAMAGED}*"):
                    remove_tree(damaged)
                with suppress(OSError):
                    folder.rmdir()
        with suppress(OSError):
            root.rmdir()
    return kept
