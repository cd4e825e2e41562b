"""Writes stored schedules, with everything that they need, into one file, and reads such files without trusting them.

A ZIP archive: `manifest.json` names every schedule with its key parts, and every other member with its SHA-256.
Nothing is unpacked to disk under a name from the archive.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from nimble_jobs.errors import StoreError, UsageError
from nimble_jobs.regular import open_regular
from nimble_jobs.store.records import ArtifactRef, ScheduleState, dump, sha256
from nimble_jobs.version import __version__
from nimble_jobs.whole import written_whole

if TYPE_CHECKING:
    from nimble_jobs.store.store import Store

FORMAT = 1
MAX_MANIFEST_BYTES = 64 << 20
MAX_TEXT_BYTES = 512 << 20
MAX_ARTIFACT_BYTES = 8 << 30
_MANIFEST = "manifest.json"
_HEX = re.compile("[0-9a-f]{64}")
_LATEST = 253402300800  # Unix seconds of the year 10000


@dataclass(frozen=True, kw_only=True)
class Bundled:
    """A schedule in such a file, as the file describes it."""

    key: str
    parts: dict[str, str]
    provenance: dict[str, str]
    created_at: float
    text_sha256: str
    text_bytes: int
    artifacts: tuple[ArtifactRef, ...]


def write_bundle(store: Store, keys: Sequence[str], path: Path, now: float) -> int:
    """Write the schedules to a new file, with every byte verified; returns its size.

    Raises UsageError if the file exists or a schedule is not ready, NotFound, Damaged, and StoreError if the file
    cannot be written.
    """
    try:
        with (
            store.artifacts.in_use(),
            _new(path),
            written_whole(path) as file,
            zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
        ):
            described = [_written(store, key, archive) for key in dict.fromkeys(keys)]
            head = {"format": FORMAT, "nimble_jobs": __version__, "created_at": now}
            archive.writestr(_MANIFEST, dump(head | {"schedules": described}))
        return path.stat().st_size
    except FileExistsError as e:
        raise UsageError(f"{path} exists already; expected the name of a new file") from e
    except OSError as e:
        raise StoreError(f"{path}: {e.strerror}; nothing was exported") from e


@contextmanager
def _new(path: Path) -> Iterator[None]:
    """Create a new file; remove it if the block fails. Raises OSError."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _written(store: Store, key: str, archive: zipfile.ZipFile) -> dict[str, Any]:
    """Write one schedule, and its artifacts that the archive lacks. Returns its entry in the manifest."""
    stored = store.schedules.verified(key)
    if stored.state != ScheduleState.READY:
        raise UsageError(f"schedule {key[:12]}: is {stored.state.value}: {stored.reason}; expected a ready one")
    archive.writestr(f"schedules/{key}.json", stored.text)
    for ref in stored.artifacts:
        if f"artifacts/{ref.name}" not in archive.NameToInfo:
            archive.writestr(f"artifacts/{ref.name}", store.artifacts.fetch(ref.name), zipfile.ZIP_STORED)
    return {
        "key": key,
        "parts": stored.parts,
        "provenance": stored.provenance,
        "created_at": stored.created_at,
        "text_sha256": sha256(stored.text),
        "text_bytes": len(stored.text.encode()),
        "artifacts": [asdict(ref) for ref in stored.artifacts],
    }


class Bundle:
    """Such a file, opened. Every method raises UsageError for a file that is not one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = path.name
        try:
            self._file = open_regular(path)
        except OSError as e:
            raise UsageError(f"{path}: {e.strerror}; expected a file that `cache export` wrote") from e
        try:
            self._archive = zipfile.ZipFile(self._file)
        except (OSError, zipfile.BadZipFile, NotImplementedError) as e:
            self._file.close()
            why = e.strerror if isinstance(e, OSError) else str(e)
            raise UsageError(f"{path}: {why}; expected a file that `cache export` wrote") from e
        try:
            self.schedules = self._schedules()
        except BaseException:
            self.close()
            raise

    def text(self, bundled: Bundled) -> str:
        """The JSON of a schedule, its digest verified."""
        member = f"schedules/{bundled.key}.json"
        data = self._read(member, bundled.text_bytes, MAX_TEXT_BYTES)
        if hashlib.sha256(data).hexdigest() != bundled.text_sha256:
            raise self._refused(f"{member}: its SHA-256 differs from the manifest")
        try:
            return data.decode()
        except UnicodeDecodeError as e:
            raise self._refused(f"{member}: {e}") from e

    def artifact(self, ref: ArtifactRef) -> bytes:
        """The bytes of an artifact, its digest verified."""
        member = f"artifacts/{ref.name}"
        data = self._read(member, ref.bytes, MAX_ARTIFACT_BYTES)
        if hashlib.sha256(data).hexdigest() != ref.name:
            raise self._refused(f"{member}: its bytes do not match the SHA-256 in its name")
        return data

    def close(self) -> None:
        self._archive.close()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _schedules(self) -> tuple[Bundled, ...]:
        names = self._archive.namelist()
        if len(set(names)) != len(names):
            raise self._refused("contains the same name twice")
        if _MANIFEST not in names:
            raise self._refused(f"has no {_MANIFEST}")
        try:
            raw = json.loads(self._read(_MANIFEST, None, MAX_MANIFEST_BYTES))
            if raw["format"] != FORMAT:
                raise self._refused(f"{_MANIFEST}: format {raw['format']!r}; this version reads {FORMAT}")
            schedules = tuple(_bundled(each) for each in raw["schedules"])
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as e:
            if isinstance(e, UsageError):
                raise
            raise self._refused(f"{_MANIFEST}: {type(e).__name__}: {e}") from e
        expected = {_MANIFEST, *(f"schedules/{s.key}.json" for s in schedules)}
        expected |= {f"artifacts/{ref.name}" for s in schedules for ref in s.artifacts}
        for name in sorted(set(names) ^ expected):
            raise self._refused(f"{name!r} is {'not in the manifest' if name in names else 'missing'}")
        if len({s.key for s in schedules}) != len(schedules):
            raise self._refused(f"{_MANIFEST}: lists a schedule twice")
        return schedules

    def _read(self, member: str, nbytes: int | None, limit: int) -> bytes:
        """A whole member, but never more bytes than the manifest promises."""
        if nbytes is not None and nbytes > limit:
            raise self._refused(f"{member}: {nbytes} bytes; expected at most {limit}")
        promised = limit if nbytes is None else nbytes
        if self._archive.getinfo(member).compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise self._refused(f"{member}: is compressed with an unsupported method")
        try:
            with self._archive.open(member) as file:
                data = file.read(promised + 1)
        except (zipfile.BadZipFile, zlib.error, OSError, EOFError, RuntimeError, ValueError) as e:
            raise self._refused(f"{member}: cannot be read ({e})") from e
        if len(data) > promised or (nbytes is not None and len(data) != nbytes):
            raise self._refused(f"{member}: does not have the {promised} bytes of the manifest")
        return data

    def _refused(self, problem: str) -> UsageError:
        return UsageError(f"{self._path}: {problem}; expected a file that `cache export` wrote")


def _bundled(raw: Any) -> Bundled:
    """Raises ValueError, TypeError, KeyError, AttributeError or OverflowError for anything but a valid description of a
    schedule.
    """
    artifacts = tuple(
        ArtifactRef(name=_hex(ref["name"]), kind=_text(ref["kind"]), bytes=_count(ref["bytes"]))
        for ref in raw["artifacts"]
    )
    return Bundled(
        key=_hex(raw["key"]),
        parts={_text(name): _text(part) for name, part in raw["parts"].items()},
        provenance={_text(name): _text(fact) for name, fact in raw["provenance"].items()},
        created_at=_time(raw["created_at"]),
        text_sha256=_hex(raw["text_sha256"]),
        text_bytes=_count(raw["text_bytes"]),
        artifacts=artifacts,
    )


def _hex(value: Any) -> str:
    if not isinstance(value, str) or not _HEX.fullmatch(value):
        raise ValueError(f"found {value!r:.80}; expected a SHA-256 in lower-case hex")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"found {value!r:.80}; expected text")
    if not value.isprintable():  # it is shown on terminals, and databases refuse lone surrogates
        raise ValueError(f"found {value!a:.80}; expected text without control characters")
    return value


def _time(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < _LATEST:
        raise ValueError(f"found {value!r:.80}; expected a time in seconds since 1970")
    return float(value)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"found {value!r:.80}; expected a number of bytes")
    return value
