"""Finds files in the shared place that no schedule of the database names any more, and removes them.

Another machine may be about to commit a row for a file that it has found or written there. So young files stay, whoever
needs an old file makes it young, and rows and files are looked at again just before each removal.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nimble_jobs.errors import NimbleError
from nimble_jobs.plural import count
from nimble_jobs.store.shared_artifacts import YOUNG_S, SharedArtifacts
from nimble_jobs.store.shared_files import SharedFile

if TYPE_CHECKING:
    from nimble_jobs.store.contents import Contents

_AT_ONCE = 100  # files that are looked at again and then removed together


@dataclass(frozen=True, kw_only=True)
class SharedRemovals:
    """A plan of what to remove from the shared place."""

    place: str
    files: Mapping[str, SharedFile] = field(default_factory=dict)
    refused: str | None = None  # why this state folder must not remove anything there
    trouble: str | None = None  # why the place could not be looked at

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files.values())


@dataclass(frozen=True, kw_only=True)
class SharedRemoved:
    """What was removed from the shared place."""

    files: int = 0
    bytes: int = 0
    unsure: int = 0  # files that may or may not be gone, because no answer came
    trouble: str | None = None  # why it ended early


def look_shared(store: Contents, *, going: Collection[str] = (), young_s: float = YOUNG_S) -> SharedRemovals | None:
    """Plan the removal of files that no schedule will name once those with the keys `going` are gone.

    Files that were written in the last `young_s` seconds, by the place's clock, stay. The mark of our database is
    written again, to learn what that clock says. None if no place is shared.
    """
    place = store.settings.usable().cache.shared
    if place is None:
        return None
    try:
        if (shared := store.shared()) is None:
            return SharedRemovals(place=place, refused="only state folders over PostgreSQL share files")
        files, marks = shared.listed()
        if files and (refused := shared.problem(marks)) is not None:
            return SharedRemovals(place=place, refused=refused)
        rows = store.schedules.artifacts()
        needed = {ref.name for key, refs in rows.items() if key not in going for ref in refs}
        unneeded = {name: file for name, file in files.items() if name not in needed}
        now = shared.mark() if unneeded else None
        if unneeded and now is None:
            return SharedRemovals(place=place, refused="it does not say when a file was written")
        return SharedRemovals(place=place, files={n: f for n, f in unneeded.items() if _old(f, now, young_s)})
    except NimbleError as e:
        return SharedRemovals(place=place, trouble=str(e))


def remove_shared(store: Contents, removals: SharedRemovals) -> SharedRemoved:
    """Carry out the plan. What a row names by now, or somebody has written since, stays. Raises nothing."""
    files = nbytes = 0
    going: list[str] = []
    try:
        shared, names = store.shared(), sorted(removals.files)
        if not names:
            return SharedRemoved()
        if shared is None or shared.place != removals.place:  # the configuration has changed
            return SharedRemoved(trouble=f"no longer {removals.place}, so nothing was removed there")
        for start in range(0, len(names), _AT_ONCE):
            batch = {name: removals.files[name] for name in names[start : start + _AT_ONCE]}
            going = _still_unneeded(store, shared, batch)
            shared.remove(going)
            left = shared.unrenewed({name: batch[name] for name in going})
            gone = [name for name in going if name not in left]
            files += len(gone)
            nbytes += sum(batch[name].size for name in gone)
            going = []
            if left:  # the drivers of some object stores do not say so
                trouble = f"{removals.place}: {count(len(left), 'file')} could not be removed; may this user do that?"
                return SharedRemoved(files=files, bytes=nbytes, trouble=trouble)
    except NimbleError as e:
        return SharedRemoved(files=files, bytes=nbytes, unsure=len(going), trouble=str(e))
    return SharedRemoved(files=files, bytes=nbytes)


def _still_unneeded(store: Contents, shared: SharedArtifacts, files: Mapping[str, SharedFile]) -> list[str]:
    named = store.schedules.named(list(files))
    return shared.unrenewed({name: file for name, file in files.items() if name not in named})


def _old(file: SharedFile, now: float | None, young_s: float) -> bool:
    return now is not None and file.modified_at is not None and now - file.modified_at >= young_s
