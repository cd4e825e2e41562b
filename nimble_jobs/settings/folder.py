"""Where the state folder is."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def choose(home: str | None) -> Path:
    """The state folder: `--home`, else NIMBLE_JOBS_HOME, else ./cache if it exists, else the user's cache folder."""
    named = home or os.environ.get("NIMBLE_JOBS_HOME")
    if named:
        return Path(named).expanduser().absolute()
    local = Path.cwd() / "cache"
    return local if local.is_dir() else Path(platformdirs.user_cache_dir("nimble-jobs", appauthor=False))
