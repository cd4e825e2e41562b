"""Whether code that this process has imported is still what its files, or its installation, say.

A process goes on with the modules that it has imported, whatever becomes of their files.
"""

from __future__ import annotations

import sys

from nimble_jobs.errors import ModelChanged

_first_seen: dict[tuple[str, str], str] = {}  # by importable name and what is looked at


def steady(name: str, what: str, found: str) -> str:
    """`found`, which is what (files, version) an importable name has on disk now.

    Raises ModelChanged where the name is imported and was something else when it was first looked at.
    """
    known = _first_seen.get((name, what), found)
    if known != found and name in sys.modules:
        raise ModelChanged(
            f"the {what} of {name} changed after this process imported it: {known[:16]} before, {found[:16]} now; a "
            "new process runs what is there now"
        )
    _first_seen[name, what] = found
    return found
