"""What a `python:` model took from its surroundings as it was built, and left there: files and settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from nimble_jobs.engine import process_settings
from nimble_jobs.models.files_read import FilesRead, files_read
from nimble_jobs.models.identity import python_identity
from nimble_jobs.models.source import source_of
from nimble_jobs.spec.model import ModelSpec


@dataclass(kw_only=True)
class Origin:
    """Complete once the model is built. Any other source of models reads what its identity names, and sets nothing."""

    files: FilesRead = field(default_factory=FilesRead)
    settings: process_settings.Values = field(default_factory=dict)  # of the process, that the code has changed

    def set_again(self) -> None:
        """Set what the model's code has set, since only this process's first job with the model runs that code."""
        process_settings.put(self.settings)


# By a model's code, what building it has set. Python imports a package only once: what an import sets, and what was put
# back after the job, would be missing at the next build.
_settings: dict[str, process_settings.Values] = {}


@contextmanager
def noted(spec: ModelSpec) -> Iterator[Origin]:
    """Note the origin of the model that is built in the block. Raises ModelError."""
    origin = Origin()
    source = source_of(spec)
    if source.scheme != "python":
        yield origin
        return
    code, before = json.dumps(python_identity(source), sort_keys=True), process_settings.taken()
    process_settings.put(_settings.get(code, {}))
    try:
        with files_read(Path(source.target).resolve()) as origin.files:
            yield origin
    finally:
        origin.settings = _settings[code] = process_settings.changed(before)
