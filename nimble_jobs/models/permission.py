"""Which folders may hold code that a job runs."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nimble_jobs.errors import ModelError
from nimble_jobs.models.identity import existing
from nimble_jobs.models.pt2_check import why_code
from nimble_jobs.models.source import source_of
from nimble_jobs.spec.model import ModelSpec


def check(spec: ModelSpec, folders: Sequence[Path]) -> None:
    """Raises ModelError for a model whose file is code outside of the folders. Also for one that is loaded already:
    whoever loaded it may have been allowed to.
    """
    source = source_of(spec)
    file = Path(source.target)
    if source.scheme == "python":
        check_python(existing(file).resolve(), folders)
    elif source.scheme == "exported":
        with existing(file).open("rb") as opened:
            check_exported(file, opened, folders)


def check_python(file: Path, folders: Sequence[Path], field: str = "model.source") -> None:
    """Raises ModelError, naming the spec's field, for a Python file outside of the folders."""
    if not _allowed(file, folders):
        raise ModelError(f"{field}: {file} may not be run; {_how_to_allow(file)}")


def check_exported(file: Path, opened: Any, folders: Sequence[Path]) -> None:
    """Raises ModelError for a program outside of the folders that holds more than tensors and known operators."""
    try:
        reason = why_code(opened)
    except (zipfile.BadZipFile, KeyError, ValueError, TypeError, AttributeError, OSError, EOFError) as e:
        raise ModelError(f"{file}: not an exported program of this version of torch: {type(e).__name__}: {e}") from e
    if reason is not None and not _allowed(file, folders):
        raise ModelError(f"{file}: {reason}, so that loading it can run code; {_how_to_allow(file)}")


def _allowed(path: Path, folders: Sequence[Path]) -> bool:
    """Whether the file, symbolic links resolved, lies below one of the folders."""
    real = path.resolve()
    return any(real.is_relative_to(folder.resolve()) for folder in folders)


def _how_to_allow(path: Path) -> str:
    """What a user types to allow the folder of the file."""
    folder = path.resolve().parent
    return f"allow its folder with --allow-python {folder} or NIMBLE_JOBS_ALLOW_PYTHON={folder}"
