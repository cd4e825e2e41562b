"""Inputs in an object store: what lies at an address, and copies of it in a folder, which a reader then opens.

    FOLDER/DIGEST/NAME/...    the objects below the address, whose last part is NAME
    FOLDER/DIGEST.complete    a file that says that all of them are there

DIGEST names what was listed: each object's name, size and version.
"""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from multiprocessing import get_context
from pathlib import Path

from nimble_jobs.addresses import fixed_part
from nimble_jobs.data.files import remove_tree, reported, sync_all
from nimble_jobs.errors import DataError, NotFound
from nimble_jobs.objects import THREADS, Objects, Stat, Through, fetch_each, once
from nimble_jobs.orphans import die_with
from nimble_jobs.pipeline import mapped, usable_cores
from nimble_jobs.plural import count
from nimble_jobs.spec.formats import SUFFIXES, InputFormat
from nimble_jobs.spec.units import format_bytes

_MANY = 2000  # objects that are worth processes of their own
_PIECE = 256  # that a process fetches at a time
_ROOM = 1 << 28  # bytes of the disk that are left for others
Arrived = Callable[[int, os.stat_result], None]  # an object's number in the listing, and its file


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a local copy comes from."""

    folder: str  # the copy's
    address: str
    source: str  # what the spec says
    digest: str  # of what was listed there

    def shown(self, text: str) -> str:
        """A message with the address in place of the copy's folder."""
        return text.replace(self.folder, self.address)


@dataclass(frozen=True, kw_only=True)
class _Copy:
    """An object that is to be copied."""

    number: int  # in the listing
    name: str
    size: int  # bytes
    path: Path
    unfinished: Path  # where it is written


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The objects of an input, when it was listed."""

    address: str  # of a folder or bucket
    rest: str  # below it: the name of one object, a glob, or "" for the folder itself
    objects: Mapping[str, Stat]  # by their names below the address, sorted

    @cached_property
    def digest(self) -> str:
        """SHA-256 in hex."""
        digest = hashlib.sha256(f"{self.address}\n".encode())
        for name, stat in self.objects.items():
            digest.update(f"{name}\0{stat.size}\0{stat.version}\n".encode())
        return digest.hexdigest()

    @property
    def nbytes(self) -> int:
        """Of all objects."""
        return sum(stat.size for stat in self.objects.values())

    def root(self, folder: Path) -> Path:
        """Where its copy lies in a folder of copies."""
        return folder / self.digest[:16] / self.address.rpartition("/")[2]

    def source(self, folder: Path) -> str:
        """What `input.source` is for a reader of the copy."""
        root = str(self.root(folder))
        if not self.rest or self.rest in self.objects:
            return str(Path(root, self.rest))
        return f"{glob.escape(root)}/{self.rest}"

    def origin(self, folder: Path, source: str) -> Origin:
        """`source` is what was listed."""
        return Origin(folder=str(self.root(folder)), address=self.address, source=source, digest=self.digest)


def list_objects(source: str, format_: InputFormat, through: Through = once) -> Listing:
    """The objects that an input at this address consists of, by the rules for files (`data.listing`).

    Raises DataError if there are none, and ObjectTrouble.
    """
    address = fixed_part(source)
    rest = source[len(address) + 1 :]
    objects = _objects(address, through)
    suffixes = SUFFIXES[format_]
    if rest:
        found = objects.glob(rest)
        if format_ == "images":
            found = {name: stat for name, stat in found.items() if name.lower().endswith(suffixes)}
    else:
        everything = objects.list()
        found = {
            name: stat
            for name, stat in everything.items()
            if name.lower().endswith(suffixes) and (format_ == "images" or "/" not in name)
        }
        if not everything and (one := _alone(source, through)) is not None:
            return one
    kept = {name: stat for name, stat in found.items() if not _hidden(name)}
    if not kept:
        expected = f"objects that match {source}" if rest else f"objects that end in {' or '.join(suffixes)}"
        raise DataError(f"{source}: nothing to read; expected {expected}")
    for name in kept:
        if "" in name.split("/"):
            raise DataError(f"{address}/{name}: cannot be the name of a file; expected parts between single slashes")
    return Listing(address=address, rest=rest, objects=kept)


def fetch(
    listing: Listing,
    folder: Path,
    through: Through = once,
    *,
    boot: str,
    arrived: Arrived | None = None,
) -> Generator[int]:
    """Copy the objects of a listing into a folder, and give the bytes of each once it is there.

    `arrived` is called by any thread for each file once it is whole; not if all were there from the start. What an
    earlier call left unfinished is used, if the machine has not been started anew since (`boot`). Other copies in the
    folder are removed. Raises DataError if an object is not what was listed, or the disk has too little room.
    """
    root, objects = listing.root(folder), _objects(listing.address, through)
    complete, temporary = folder / f"{root.parent.name}.complete", root.parent / "unfinished"
    _make_room(folder, root, temporary, complete, boot)
    if complete.exists():
        return
    arrived = arrived or (lambda _number, _found: None)
    missing = _missing(listing, root, temporary, arrived)
    _check_room(listing, missing, folder)

    def one(copy: _Copy) -> int:
        with reported(copy.path):
            try:
                objects.fetch(copy.name, copy.unfinished)
            except NotFound as e:
                raise _moved(listing, copy.name, "vanished") from e
        return placed(copy)

    def placed(copy: _Copy) -> int:
        with reported(copy.path):
            found = copy.unfinished.stat()
            if found.st_size != copy.size:
                raise _moved(listing, copy.name, "changed")
            copy.unfinished.replace(copy.path)
        arrived(copy.number, found)
        return copy.size

    if len(missing) >= _MANY and (processes := usable_cores()) > 1:
        with closing(_by_processes(listing.address, missing, processes)) as copies:
            for copy, fetched in copies:
                yield placed(copy) if fetched else one(copy)
    else:
        yield from mapped(one, missing, threads=THREADS, depth=2 * THREADS, name="nimble-fetch")
    _check_same(listing, objects)
    with reported(folder):
        remove_tree(temporary)
        sync_all([*(root / name for name in listing.objects), root, root.parent])
        complete.touch()


def _make_room(folder: Path, root: Path, temporary: Path, complete: Path, boot: str) -> None:
    """Make the folders of a copy, without what an earlier boot left of it; remove other copies."""
    begun = complete.with_suffix(".begun")
    folder.mkdir(parents=True, exist_ok=True)
    with reported(folder):
        for other in folder.iterdir():
            if other not in (root.parent, complete, begun):
                remove_tree(other)
        if complete.exists():
            return
        if not begun.exists() or begun.read_text() != boot:  # files of another boot may lack their bytes
            remove_tree(root.parent)
            begun.write_text(boot)
        for needed in (root, temporary):
            needed.mkdir(parents=True, exist_ok=True)


def _missing(listing: Listing, root: Path, temporary: Path, arrived: Arrived) -> list[_Copy]:
    """What is not there yet, with a folder for each."""
    copies, folders = [], set[Path]()
    for number, (name, stat) in enumerate(listing.objects.items()):
        path = root / name
        with reported(path):
            if path.parent not in folders:
                folders.add(path.parent)
                path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_file() and (found := path.stat()).st_size == stat.size:
                arrived(number, found)
            else:
                unfinished = temporary / str(number)
                copies.append(_Copy(number=number, name=name, size=stat.size, path=path, unfinished=unfinished))
    return copies


def _by_processes(address: str, copies: list[_Copy], processes: int) -> Generator[tuple[_Copy, bool]]:
    """Copies that processes tried to make, and whether they could: a request takes a core longer than a network."""
    pool = ProcessPoolExecutor(
        min(processes, len(copies) // _PIECE),
        mp_context=get_context("spawn"),
        initializer=die_with,
        initargs=(os.getpid(),),
    )
    pieces = [copies[i : i + _PIECE] for i in range(0, len(copies), _PIECE)]
    try:
        wanted = ([(copy.name, str(copy.unfinished)) for copy in piece] for piece in pieces)
        for piece, worked in zip(pieces, pool.map(partial(fetch_each, address), wanted), strict=True):
            yield from zip(piece, worked, strict=True)
    except BrokenProcessPool as e:
        raise DataError(f"{address}: a process that fetched objects was killed") from e
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _objects(address: str, through: Through) -> Objects:
    return Objects(address, through, whole_bucket=True)


def _alone(source: str, through: Through) -> Listing | None:
    """The object at an address at which no folder is; None if there is none."""
    address, _, name = source.rpartition("/")
    if address.endswith(":/"):  # a bucket
        return None
    try:
        stat = _objects(address, through).stat(name)
    except NotFound:
        return None
    return Listing(address=address, rest=name, objects={name: stat})


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _check_room(listing: Listing, missing: list[_Copy], folder: Path) -> None:
    needed, free = sum(copy.size for copy in missing), shutil.disk_usage(folder).free
    if needed + _ROOM > free:
        raise DataError(
            f"{listing.address}: {format_bytes(needed)} in {count(len(missing), 'object')} do not fit into "
            f"{folder}, whose disk has {format_bytes(free)} left; choose another state folder with --home"
        )


def _check_same(listing: Listing, objects: Objects) -> None:
    """Objects that changed while they were fetched would be a mixture that never was in the store."""
    now = objects.glob(listing.rest) if listing.rest else objects.list()
    for name, stat in listing.objects.items():
        if now.get(name) != stat:
            raise _moved(listing, name, "changed" if name in now else "vanished")


def _moved(listing: Listing, name: str, how: str) -> DataError:
    return DataError(f"{listing.address}/{name}: {how} while the input was fetched")
