"""Where several state folders over one database share artifacts: a folder that all of them see, or an object store.

Nothing there is trusted: whoever reads an artifact compares its SHA-256 with the name, which the database gave.

Each database whose artifacts lie there has a mark in `databases/`. Only with these can anybody know which files are no
longer needed, because each database knows only the files that its own rows name.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from nimble_jobs.errors import StoreError
from nimble_jobs.store.shared_files import Files, SharedFile, open_files

YOUNG_S = 86_400.0  # files that were written later than this before are not removed: a row may still come for them
_RENEW_S = YOUNG_S / 2  # whoever needs a file older than this writes it again, so that it is young
_COARSE_S = 1.0  # some object stores give whole seconds, and fractions of them in listings alone

_ARTIFACT = re.compile("([0-9a-f]{2})/(\\1[0-9a-f]{62})")
_FOLDERS = re.compile("[0-9a-f]{2}|databases")
_MARK = re.compile("databases/([0-9a-f]{32})\\.json")


@dataclass(frozen=True, kw_only=True)
class User:
    """A database whose artifacts are shared."""

    id: str  # 32 hex digits
    name: str  # for people: its address, without a password


class SharedArtifacts:
    """Bytes by the name of an artifact. Methods raise StoreError, or what `Objects` raises."""

    def __init__(self, place: str, user: Callable[[], User]) -> None:
        """A shared folder, or an address in an object store. `user` is asked when something is written.

        Raises DataError for an address that cannot be used.
        """
        self.place = place
        self._files: Files = open_files(place)
        self._user = user
        self._marked = False

    def get(self, name: str) -> bytes:
        """The bytes, as they are. Raises NotFound."""
        return self._files.read(_path(name))

    def has(self, name: str) -> bool:
        return bool(self._files.stats([_path(name)]))

    def put(self, name: str, data: bytes) -> None:
        """Write what is not there, and anew what is so old that it may just be removed."""
        if not self._marked:
            if not self._files.stats([_mark_path(self._user().id)]):
                self.mark()
            self._marked = True
        file = self._files.stats([_path(name)]).get(_path(name))
        if file is None or (file.modified_at is not None and time.time() - file.modified_at >= _RENEW_S):
            self._files.write(_path(name), data)

    def remove(self, names: Iterable[str]) -> None:
        """Delete files. After an error, some may be gone."""
        self._files.remove([_path(name) for name in names])

    def listed(self) -> tuple[dict[str, SharedFile], set[str]]:
        """The artifacts by name, and the ids of the databases that have marks. Other files are left out."""
        artifacts, marks = {}, set()
        for path, file in self._files.list(_FOLDERS).items():
            if artifact := _ARTIFACT.fullmatch(path):
                artifacts[artifact[2]] = file
            elif mark := _MARK.fullmatch(path):
                marks.add(mark[1])
        return artifacts, marks

    def unrenewed(self, files: Mapping[str, SharedFile]) -> list[str]:
        """The names of those that are there still, and that nobody has written since they were listed."""
        current = self._files.stats([_path(name) for name in files])
        return [name for name, file in files.items() if _same(current.get(_path(name)), file)]

    def mark(self) -> float | None:
        """Write the mark of our database. Returns the place's time in Unix seconds, if it tells when files change."""
        user = self._user()
        path = _mark_path(user.id)
        self._files.write(path, json.dumps({"format": 1, "database": user.name}).encode())
        if (file := self._files.stats([path]).get(path)) is None:
            raise StoreError(f"{self.place}: {path} was written, and then was not there")
        return file.modified_at

    def problem(self, marks: set[str]) -> str | None:
        """Why the rows of our database do not tell which files are needed; None if they do.

        `marks`: the ids of the databases that have marks.
        """
        ours = self._user().id
        if others := sorted(marks - {ours}):
            return (
                f"files of another database are there too ({', '.join(self._named(others))}); "
                "if it no longer uses the place, remove that mark"
            )
        if ours not in marks:
            return f"it has no mark of this database ({_mark_path(ours)}); the next build of a schedule makes it"
        return None

    def _named(self, ids: Sequence[str]) -> list[str]:
        """Paths of marks, each with the name of its database if that can be read."""
        shown = []
        for each in ids:
            try:
                name = str(json.loads(self._files.read(_mark_path(each)))["database"])
            except (ValueError, KeyError, TypeError):
                name = "a database whose mark is damaged"
            shown.append(f"{_mark_path(each)}: {name}")
        return shown


def _same(current: SharedFile | None, listed: SharedFile) -> bool:
    if current is None or current.modified_at is None or listed.modified_at is None:
        return False
    return abs(current.modified_at - listed.modified_at) < _COARSE_S  # also if the place's clock was set back


def _path(name: str) -> str:
    return f"{name[:2]}/{name}"


def _mark_path(database: str) -> str:
    return f"databases/{database}.json"
