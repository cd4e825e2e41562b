"""Where a job's output goes: a local folder, or an address in an object store."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationInfo

from nimble_jobs.addresses import is_address, normal, problem_of
from nimble_jobs.spec import paths
from nimble_jobs.spec.timer_fields import check_templates
from nimble_jobs.spec.units import BadValue, wrong


def output_path(value: object, info: ValidationInfo) -> Path | str:
    """An absolute path, or an address as text. Raises BadValue."""
    if isinstance(value, Path):
        return value
    if not isinstance(value, str):
        raise BadValue(wrong(value), "a folder")
    check_templates(value)
    if not is_address(value):
        return Path(paths.absolute(value, (info.context or {}).get("base")))
    if problem := problem_of(value):
        raise BadValue(*problem)
    return normal(value)
