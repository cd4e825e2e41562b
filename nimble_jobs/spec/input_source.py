"""Where records come from: a local file, folder or glob, or the same in an object store."""

from __future__ import annotations

from pathlib import Path

from nimble_jobs.addresses import is_address, normal, problem_of
from nimble_jobs.spec import paths
from nimble_jobs.spec.units import BadValue


def input_source(text: str, base: Path | None) -> str:
    """An absolute path or glob, or an address, which may be a glob too. Raises BadValue."""
    if not is_address(text):
        return paths.absolute_glob(text, base)
    if problem := problem_of(text, whole_bucket=True):
        raise BadValue(*problem)
    return normal(text)
