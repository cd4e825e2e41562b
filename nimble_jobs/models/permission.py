"""Which folders may hold code that a job runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def allowed(path: Path, folders: Sequence[Path]) -> bool:
    """Whether the file, symbolic links resolved, lies below one of the folders."""
    real = path.resolve()
    return any(real.is_relative_to(folder.resolve()) for folder in folders)


def how_to_allow(path: Path) -> str:
    """What a user types to allow the folder of the file."""
    folder = path.resolve().parent
    return f"allow its folder with --allow-python {folder} or NIMBLE_JOBS_ALLOW_PYTHON={folder}"
