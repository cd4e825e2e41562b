"""Which folders may hold code that a job runs."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nimble_jobs.errors import ModelError
from nimble_jobs.models.identity import existing, opened
from nimble_jobs.models.pt2_check import why_code
from nimble_jobs.models.source import source_of
from nimble_jobs.spec.code import allowed, how_to_allow, why_refused
from nimble_jobs.spec.model import ModelSpec


def check(spec: ModelSpec, folders: Sequence[Path]) -> None:
    """Raise ModelError if the model's file is code outside the folders.

    Also if the model is loaded already, since the job that loaded it may have been allowed more.
    """
    source = source_of(spec)
    file = Path(source.target)
    if source.scheme == "python":
        check_python(existing(file).resolve(), folders)
    elif source.scheme == "exported":
        with opened(file) as archive:
            check_exported(file, archive, folders)


def check_python(file: Path, folders: Sequence[Path], field: str = "model.source") -> None:
    """Raise ModelError, naming the spec's field, if a Python file lies outside the folders."""
    if not allowed(file, folders):
        raise ModelError(why_refused(field, file))


def check_exported(file: Path, opened: Any, folders: Sequence[Path]) -> None:
    """Raise ModelError if a program outside the folders holds more than tensors and known operators."""
    try:
        reason = why_code(opened)
    except (zipfile.BadZipFile, KeyError, ValueError, TypeError, AttributeError, OSError, EOFError) as e:
        raise ModelError(f"{file}: not an exported program of this version of torch: {type(e).__name__}: {e}") from e
    if reason is not None and not allowed(file, folders):
        raise ModelError(f"{file}: {reason}, so loading it can run code; {how_to_allow(file)}")
