"""Inputs in an object store are fetched into a folder of the job that goes when the job ends.

Pictures are scored while others are still fetched; of other inputs all objects must be there before the first is read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import TypeVar

from nimble_jobs import moves
from nimble_jobs.addresses import is_address
from nimble_jobs.data.arriving import Arriving
from nimble_jobs.data.fetched import folder_of
from nimble_jobs.data.object_inputs import Origin, fetch, list_objects
from nimble_jobs.data.transform import one_size
from nimble_jobs.pipeline import Beside
from nimble_jobs.plural import count
from nimble_jobs.spec.units import format_bytes, format_duration
from nimble_jobs.store.leases import boot_id
from nimble_jobs.store.locks import exclusive
from nimble_jobs.workloads.context import JobContext, Stop, Stopped

T = TypeVar("T")

_POLL_S = 0.5  # between two looks whether another process has fetched the input
_LOOK_S = 0.02  # between two looks whether an object has arrived


@contextmanager
def fetched(context: JobContext) -> Iterator[JobContext]:
    """Inside the block, the same job with local copies of its inputs. Members of it on this machine share them.

    Pictures may still be on their way (`JobContext.fetching`). Nothing is fetched any more after the block. Raises
    DataError if an input is missing or changes meanwhile, and Stopped.
    """
    spec, origins = context.spec, dict[str, Origin]()
    with ExitStack() as opened:
        beside = None
        if is_address(spec.input.source):
            pictures = _scores_pictures(context)
            fetching = opened.enter_context(closing(Fetcher(context, spec.input.source, "input", beside=pictures)))
            if fetching.begins():
                beside = fetching
            else:
                fetching.finish()
            source = fetching.adds_to(origins)
            spec = spec.model_copy(update={"input": spec.input.model_copy(update={"source": source})})
        if spec.train is not None and spec.train.validation is not None and is_address(spec.train.validation.source):
            fetching = opened.enter_context(closing(Fetcher(context, spec.train.validation.source, "validation")))
            fetching.finish()
            held_out = spec.train.validation.model_copy(update={"source": fetching.adds_to(origins)})
            spec = spec.model_copy(update={"train": spec.train.model_copy(update={"validation": held_out})})
        yield replace(context, spec=spec, origins=origins, fetching=beside) if origins else context


class Fetcher:
    """One input that a thread fetches; as `Fetching` says."""

    def __init__(self, context: JobContext, address: str, which: str, *, beside: bool = False) -> None:
        """List the objects, and begin to fetch them; `beside`: others read them meanwhile. Raises DataError."""
        context.report(phase="fetch")
        self._context, self._address = context, address
        self._listing = list_objects(address, context.spec.input.format, context.patience.through)
        self._folder = folder_of(context.store.home, context.job.id) / which
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.arriving = Arriving(self._listing, self._listing.root(self._folder)) if beside else None
        self._moves = 0  # grows whenever the thread gets on
        self._error: BaseException | None = None
        self._ended, self._unwanted = threading.Event(), threading.Event()
        self._work = Beside(self._run, name="nimble-fetch")

    def adds_to(self, origins: dict[str, Origin]) -> str:
        """Where the copy lies, whose origin is added."""
        source = self._listing.source(self._folder)
        origins[source] = self._listing.origin(self._folder, self._address)
        return source

    def begins(self) -> bool:
        """Wait for the first file; False if all are there, or if they cannot be read beside.

        Raises what ended the fetching, and Stopped.
        """
        arriving = self.arriving
        if arriving is None or not len(arriving):
            return False
        self._until(lambda: self._ended.is_set() or arriving.any())
        return not self._ended.is_set()

    def until(self, start: int, stop: int) -> None:
        """As `Fetching` says."""
        if (arriving := self.arriving) is not None:
            self._until(lambda: arriving.over or arriving.have(start, stop))  # over: who reads them tells why

    def finish(self) -> None:
        """As `Fetching` says."""
        self._until(self._ended.is_set)

    def unread(self) -> None:
        """As `Fetching` says."""
        self._nothing_comes(Stopped())

    def close(self) -> None:
        """End the thread."""
        self._unwanted.set()
        self._work.wait()

    def _until(self, there: Callable[[], bool]) -> None:
        seen = -1
        while self._error is None and not there():
            if self._moves != seen:  # whoever asks whether to stop tells that the job moves
                seen = self._moves
                moves.made()
                if self._context.stop() is not Stop.GO:
                    raise Stopped
            self._ended.wait(_LOOK_S)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with exclusive(self._folder.with_suffix(".lock"), poll_s=_POLL_S, waiting=lambda _: self._moved()):
                self._fetch()
        except BaseException as e:  # noqa: BLE001 - raised where the objects are awaited
            self._error = e
            self._nothing_comes(e)
        finally:
            self._ended.set()

    def _fetch(self) -> None:
        start, nbytes, objects, listing = time.perf_counter(), 0, 0, self._listing
        arrived = self.arriving.put if self.arriving is not None else None
        with closing(fetch(listing, self._folder, self._through, boot=boot_id(), arrived=arrived)) as sizes:
            for size in sizes:
                self._moved()
                nbytes, objects = nbytes + size, objects + 1
        took_s = time.perf_counter() - start
        said = f"{listing.address}: {count(len(listing.objects), 'object')}, {format_bytes(listing.nbytes)}"
        if objects:
            said += f"; fetched {format_bytes(nbytes)} in {format_duration(took_s)}"
        else:
            said += "; an earlier attempt or another device of this job has fetched them"
        self._context.event("fetched", said, {"objects": objects, "bytes": nbytes, "seconds": took_s})

    def _through(self, work: Callable[[], T]) -> T:
        def wanted() -> T:
            if self._unwanted.is_set():
                raise Stopped
            return work()

        return self._context.patience.through(wanted)

    def _nothing_comes(self, error: BaseException) -> None:
        if self.arriving is not None:
            self.arriving.end(error)

    def _moved(self) -> None:
        if self._unwanted.is_set():
            raise Stopped
        self._moves += 1


def _scores_pictures(context: JobContext) -> bool:
    """Whether records can be scored before all are there: pictures of which nothing must be known in advance.

    If several devices share the job, one that cannot go on would leave its shards to the others, so it waits.
    """
    spec = context.spec
    return (
        spec.kind == "score"
        and spec.input.format == "images"
        and one_size(spec.input.transform)
        and context.membership is None
    )
