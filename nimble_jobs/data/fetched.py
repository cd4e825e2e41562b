"""Copies of inputs from object stores, a folder for each job in the state folder: inputs/JOB."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nimble_jobs.data.files import remove_tree, reported

_INPUTS = "inputs"


def folder_of(home: Path, job_id: str) -> Path:
    """The folder of a job's copies."""
    return home / _INPUTS / job_id


def held(home: Path) -> Iterator[Path]:
    """The folders that are there; the name of each is its job's id."""
    folder = home / _INPUTS
    if folder.is_dir():
        yield from sorted(folder.iterdir())


def forget(home: Path, job_id: str) -> None:
    """Remove a job's copies, if there are any. Raises DataError."""
    folder = folder_of(home, job_id)
    with reported(folder):
        remove_tree(folder)
