"""What builds a schedule here: version and commit of this package, Python, and the host's name."""

from __future__ import annotations

import functools
import platform
import re
from pathlib import Path

from nimble_jobs.version import __version__

_HASH = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")


@functools.cache
def provenance() -> dict[str, str]:
    """Readable facts; the commit only if the package runs from a checkout."""
    facts = {"nimble_jobs": __version__, "python": platform.python_version(), "host": platform.node()}
    commit = checked_out(Path(__file__).parents[2] / ".git")
    return facts | {"commit": commit[:12]} if commit else facts


def checked_out(git: Path) -> str | None:
    """The commit of HEAD in a `.git` folder; None if it cannot be read."""
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head if _HASH.fullmatch(head) else None
        name = head.removeprefix("ref: ")
        if (git / name).is_file():
            found = (git / name).read_text().strip()
            return found if _HASH.fullmatch(found) else None
        for line in (git / "packed-refs").read_text().splitlines():
            commit, _, packed = line.partition(" ")
            if packed == name and _HASH.fullmatch(commit):
                return commit
    except (OSError, ValueError):
        return None
    return None
