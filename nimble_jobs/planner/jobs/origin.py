"""What a `python:` model took from its surroundings as it was built, and left there: files and settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from nimble_jobs.engine import process_settings
from nimble_jobs.models.files_read import FilesRead, files_read
from nimble_jobs.models.source import source_of
from nimble_jobs.spec.model import ModelSpec


@dataclass(kw_only=True)
class Origin:
    """Complete once the model is built. Any other source of models reads what its identity names, and sets nothing."""

    files: FilesRead = field(default_factory=FilesRead)
    settings: process_settings.Values = field(default_factory=dict)  # of the process, right after the build

    def changed(self) -> str | None:
        """The path of a file that the model was built from and that is another one now; None if there is none."""
        return self.files.changed()

    def set_again(self) -> None:
        """Set what the model's code has set, since only this process's first job with the model runs that code."""
        process_settings.put(self.settings)


@contextmanager
def noted(spec: ModelSpec) -> Iterator[Origin]:
    """Note the origin of the model that is built in the block."""
    origin = Origin()
    source = source_of(spec)
    if source.scheme != "python":
        yield origin
        return
    with files_read(Path(source.target).resolve()) as origin.files:
        yield origin
    origin.settings = process_settings.taken()
