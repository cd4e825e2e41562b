"""What a job takes from the configuration, since its spec leaves it open: for `show`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nimble_jobs.settings.model import DEFAULT, Settings


def taken(spec: Mapping[str, Any], allow_python: Sequence[str], settings: Settings) -> dict[str, dict[str, Any]]:
    """Value and origin of each field of a job that came from the file, the environment or a command line.

    `allow_python`: the folders whose code the job may run.
    """
    found: dict[str, dict[str, Any]] = {}
    origin = settings.origin("limits.stall")
    if origin != DEFAULT and spec.get("run", {}).get("stall") is None:
        found["run.stall"] = {"value": settings.limits.stall, "origin": origin}
    ours = {str(Path(folder).resolve()) for folder in settings.allow_python}
    folders = [folder for folder in allow_python if folder in ours]
    if folders and "python:" in str(spec.get("model", {}).get("source", "")) + str(spec.get("train")):
        found["allow_python"] = {"value": folders, "origin": settings.origin("allow_python")}
    return found
