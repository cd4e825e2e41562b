"""What attempts leave in an object store beside published files, and its removal."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from nimble_jobs.data.publish import MANIFEST
from nimble_jobs.data.shard_files import Note
from nimble_jobs.errors import NotFound
from nimble_jobs.objects import Objects, Stat

NOTE = ".note"  # what an attempt keeps for later ones
RUN = re.compile(r"([A-Za-z0-9_]+)-(\d+)-[0-9a-f]{8}/(.+)")  # what an attempt of a job writes: JOB-ATTEMPT-RANDOM/NAME


def run_of(name: str) -> tuple[str, int] | None:
    """The job and the number of the attempt that wrote an object; None for any other object."""
    found = RUN.fullmatch(name)
    return None if found is None else (found[1], int(found[2]))


def unpublished(objects: Objects, names: Mapping[str, Stat], job_id: str, *, attempt: int | None = None) -> list[str]:
    """What a job's attempts, or those up to `attempt`, wrote and did not publish. Raises DataError, ObjectTrouble."""
    held = named_in(manifest_of(objects))
    runs = ((name, run_of(name)) for name in names if name not in held)
    return [name for name, run in runs if run and run[0] == job_id and (attempt is None or run[1] <= attempt)]


def discard_objects(address: str, job_id: str) -> None:
    """Remove what a job that has ended for good wrote and did not publish. Raises DataError, ObjectTrouble."""
    objects = Objects(address)
    gone = unpublished(objects, objects.list(), job_id)
    if not gone:
        return
    objects.remove(gone)
    manifest = manifest_of(objects)
    late = named_in(manifest) if manifest.get("job_id") == job_id else set()
    if late.intersection(gone):  # an attempt that had been stopped published after the job's end
        objects.remove([MANIFEST, *late])


def manifest_of(objects: Objects) -> dict[str, Any]:
    """The manifest; empty if there is none, or none that can be read. Raises DataError, ObjectTrouble."""
    try:
        contents = json.loads(objects.read(MANIFEST))
    except (NotFound, ValueError, RecursionError):
        return {}
    return contents if isinstance(contents, dict) else {}


def named_in(manifest: Mapping[str, Any]) -> set[str]:
    """The files that a manifest names."""
    try:
        return {str(file["name"]) for file in manifest["files"]}
    except (KeyError, TypeError):
        return set()


def holder_of(address: str) -> str | None:
    """The job whose output an address holds. Raises DataError, ObjectTrouble."""
    job = manifest_of(Objects(address)).get("job_id")
    return job if isinstance(job, str) else None


def left_at(address: str) -> dict[str, int]:
    """The jobs whose attempts left objects at an address, published or not, and how many bytes."""
    sizes: dict[str, int] = {}
    for name, stat in Objects(address).list().items():
        if run := run_of(name):
            sizes[run[0]] = sizes.get(run[0], 0) + stat.size
    return sizes


def notes(objects: Objects, runs: Mapping[str, int]) -> Iterator[Note]:
    """What was noted in these runs, objects with the number of their attempt, the newest first."""
    for name in sorted((n for n in runs if n.endswith(f"/{NOTE}")), key=runs.__getitem__, reverse=True):
        try:
            found = json.loads(objects.read(name))
            yield Note(basis=found["basis"], value=found["value"])
        except (NotFound, ValueError, KeyError, TypeError, RecursionError):  # only a sign that an attempt has begun
            continue
