"""Objects below an address such as s3://bucket/folder. The only module that knows fsspec.

The driver asks the store once. An answer that did not come raises ObjectTrouble, and whoever opened the address decides
whether to try again. Credentials are those of the environment or of the usual files. They appear in no message, and
neither does text that the driver wrote.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

from nimble_jobs.addresses import problem_of, problem_of_driver, split
from nimble_jobs.errors import DataError, NimbleError, NotFound, ObjectTrouble

T = TypeVar("T")

THREADS = 32  # requests at once that one process can keep up with

# One try for each call: whoever calls repeats it, and counts.
_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {"config_kwargs": {"retries": {"total_max_attempts": 1}, "connect_timeout": 10, "read_timeout": 60}}
}
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError", "ProfileNotFound")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_UNMET = ("PreconditionFailed", "ConditionalRequestConflict")
_NETWORK = ("aiobotocore", "aiohttp", "asyncio", "botocore", "fsspec", "gcsfs", "azure", "google", "requests", "ssl")


class Unmet(NimbleError):
    """The condition of a write did not hold: the object exists, or is another one by now."""


class Through(Protocol):
    """How to make a request: once, or again and again, as `Patience.through` does."""

    def __call__(self, work: Callable[[], T]) -> T: ...


def once(work: Callable[[], T]) -> T:
    """Make a request once."""
    return work()


@dataclass(frozen=True, kw_only=True)
class Stat:
    """What a store says about an object without its bytes."""

    size: int  # in bytes
    version: str  # ETag, or what the driver has in its place; "" if it has none
    modified_at: float | None  # Unix seconds by the store's clock; None if it does not say


class Objects:
    """The objects below one address, by names with slashes. Threads may share one."""

    def __init__(self, address: str, through: Through = once, *, whole_bucket: bool = False) -> None:
        """Asks nothing. `through` makes each request, and may repeat it after ObjectTrouble. Raises DataError for an
        address that cannot be used; one of a bucket can only with `whole_bucket`.
        """
        problem = problem_of(address, whole_bucket=whole_bucket) or problem_of_driver(address)
        if problem is not None:
            raise DataError(f"{address if '@' not in address else 'address'}: {problem[0]}; expected {problem[1]}")
        self.address = address.rstrip("/")
        self._through = through
        self.scheme, self._bucket, rest = split(self.address)
        self._root = f"{self._bucket}/{rest}" if rest else self._bucket
        self._lock = threading.Lock()
        self._driver: Any = None
        self.troubles = 0  # answers that did not come

    @property
    def conditional(self) -> bool:
        """Whether an object can be replaced on the condition that nobody else has replaced it."""
        return self.scheme == "s3"

    def read(self, name: str) -> bytes:
        """All bytes of an object. Raises NotFound, ObjectTrouble, DataError."""
        return bytes(self._ask(name, lambda driver: driver.cat_file(self._path(name))))

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Write an object, in place of any other of that name. Raises ObjectTrouble, DataError."""
        self._ask(name, lambda driver: driver.pipe_file(self._path(name), bytes(data)))

    def create(self, name: str, data: bytes) -> None:
        """Write an object that does not exist. Raises Unmet if it does, ObjectTrouble, DataError.

        If an answer did not come, it may be this very call that made what exists. A store without conditional writes
        is asked first whether the object exists, so two writers at the same moment may both succeed, and the later
        one's bytes stay.
        """
        self._ask(name, lambda driver: driver.pipe_file(self._path(name), data, mode="create"))

    def replace(self, name: str, data: bytes, version: str) -> None:
        """Write an object in place of one of this version. Raises Unmet if that has changed, ObjectTrouble, DataError.

        Where there is no such condition (`conditional`), the object is replaced whatever it is.
        """
        condition = {"IfMatch": version} if self.conditional else {}
        self._ask(name, lambda driver: driver.pipe_file(self._path(name), data, **condition))

    def stat(self, name: str) -> Stat:
        """Raises NotFound, ObjectTrouble, DataError."""
        return _stat(self._ask(name, lambda driver: driver.info(self._path(name))))

    def list(self, prefix: str = "") -> dict[str, Stat]:
        """Every object in a folder and in all folders below it, by name. Raises ObjectTrouble, DataError."""
        folder = self._path(prefix) if prefix else self._root
        found = self._ask(prefix, lambda driver: driver.find(folder, detail=True))
        at = len(self._root) + 1
        return {path[at:]: _stat(info) for path, info in sorted(found.items()) if path.startswith(f"{folder}/")}

    def glob(self, pattern: str) -> dict[str, Stat]:
        """The objects whose names match a glob; `**` is any folders. Raises ObjectTrouble, DataError."""
        found = self._ask(pattern, lambda driver: driver.glob(self._path(pattern), detail=True))
        at = len(self._root) + 1
        return {path[at:]: _stat(info) for path, info in sorted(found.items()) if info.get("type") != "directory"}

    def fetch(self, name: str, path: Path) -> None:
        """Copy an object into a file. Raises NotFound, ObjectTrouble, DataError, also for a full disk."""
        self._ask(name, lambda driver: driver.get_file(self._path(name), str(path)))

    def remove(self, names: Iterable[str]) -> None:
        """Delete objects; those that do not exist are no mistake. Raises ObjectTrouble, DataError."""
        if gone := [self._path(name) for name in names]:
            with suppress(NotFound):
                self._ask("", lambda driver: driver.rm(gone))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _ask(self, name: str, request: Callable[[Any], Any]) -> Any:
        """The driver's answer, or its error in our words."""
        where = f"{self.address}/{name}" if name else self.address

        def asked() -> Any:
            try:
                with self._lock:
                    if self._driver is None:
                        self._driver = self._open()
                return request(self._driver)
            except Exception as error:
                raised = self._in_our_words(where, error)
                if isinstance(raised, ObjectTrouble):
                    with self._lock:
                        self.troubles += 1
                raise raised from error

        return self._through(asked)

    def _open(self) -> Any:
        import fsspec  # loaded with the first object, because few jobs have any

        options = {"skip_instance_cache": True, "use_listings_cache": False}
        driver = fsspec.filesystem(self.scheme, **options, **_OPTIONS.get(self.scheme, {}))
        if hasattr(driver, "retries"):
            driver.retries = 1
        return driver

    def _in_our_words(self, where: str, error: Exception) -> NimbleError:
        kind, code = type(error), _code_of(error)
        if isinstance(error, FileExistsError) or code in _UNMET:
            return Unmet(f"{where}: exists, or has changed")
        if code == "NoSuchBucket":
            return DataError(f"{self.scheme}://{self._bucket}: no such bucket; expected one that exists")
        if isinstance(error, OSError) and error.errno in _FULL:
            return DataError(f"{where}: cannot be kept: {error.strerror}")
        if isinstance(error, FileNotFoundError):
            return NotFound(f"{where}: no such object")
        if kind.__name__ in _NO_CREDENTIALS:
            return DataError(
                f"{where}: no credentials; expected them in the environment (AWS_ACCESS_KEY_ID, AWS_PROFILE and the "
                "like) or in the files of the store's own tools"
            )
        if isinstance(error, PermissionError) or code in ("403", "401", "Forbidden"):
            return DataError(f"{where}: permission denied{f' ({code})' if code else ''}")
        network = kind.__module__.partition(".")[0] in _NETWORK and kind.__name__ != "ParamValidationError"
        status = _status_of(error)
        passing = network if status is None else status >= 500 or status in (408, 429)
        if passing or isinstance(error, ConnectionError | TimeoutError | EOFError):
            return ObjectTrouble(f"{where}: {code or kind.__name__}; the object store did not answer")
        return DataError(f"{where}: {code or kind.__name__}: the object store refused")


def fetch_each(address: str, wanted: Sequence[tuple[str, str]]) -> list[bool]:
    """Copy objects into files, each named with its path; whether that worked at once. For processes of their own."""
    objects = _of_process(address)

    def fetch(one: tuple[str, str]) -> bool:
        try:
            objects.fetch(one[0], Path(one[1]))
        except NimbleError:  # whoever asked tries again, and learns why
            return False
        return True

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(fetch, wanted))


@cache
def _of_process(address: str) -> Objects:
    return Objects(address, whole_bucket=True)


def _stat(info: dict[str, Any]) -> Stat:
    version = next((str(info[key]) for key in ("ETag", "etag", "generation", "mtime") if info.get(key)), "")
    return Stat(size=int(info.get("size") or 0), version=version, modified_at=_modified_at(info))


def _modified_at(info: dict[str, Any]) -> float | None:
    """Drivers give a time with its zone, or a text in ISO 8601."""
    for key in ("LastModified", "last_modified", "updated"):
        value = info.get(key)
        try:
            when = datetime.fromisoformat(value) if isinstance(value, str) else value
        except ValueError:
            continue
        if isinstance(when, datetime) and when.tzinfo is not None:
            return when.timestamp()
    return None


def _response_of(error: BaseException | None) -> dict[str, Any]:
    """What the store answered, in the form of botocore's ClientError; empty if it did not."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return response
        error = error.__cause__
    return {}


def _code_of(error: Exception) -> str:
    return str(_response_of(error).get("Error", {}).get("Code", ""))


def _status_of(error: Exception) -> int | None:
    status = _response_of(error).get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status if isinstance(status, int) else None
