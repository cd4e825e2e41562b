"""Checks whether code that this process has imported still matches its files or its installed version.

A process keeps using the modules that it has imported, even if their files change.
"""

from __future__ import annotations

import sys

from nimble_jobs.errors import ModelChanged

_first_seen: dict[tuple[str, str], str] = {}  # by importable name and what is looked at


def steady(name: str, what: str, found: str) -> str:
    """Return `found`, the current digest or version of an importable name. `what` is "files" or "version".

    Raises ModelChanged if the name has been imported, and `found` was different at the first check.
    """
    known = _first_seen.get((name, what), found)
    if known != found and name in sys.modules:
        raise ModelChanged(
            f"the {what} of {name} changed after this process imported it: {known[:16]} before, {found[:16]} now; "
            "start a new process to run the current one"
        )
    _first_seen[name, what] = found
    return found
