"""Inputs in an object store are fetched before they are read, into a folder of the job that goes when the job ends."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from nimble_jobs import moves
from nimble_jobs.addresses import is_address
from nimble_jobs.data.fetched import folder_of
from nimble_jobs.data.object_inputs import Listing, Origin, fetch, list_objects
from nimble_jobs.plural import count
from nimble_jobs.spec.units import format_bytes, format_duration
from nimble_jobs.store.leases import boot_id
from nimble_jobs.store.locks import exclusive
from nimble_jobs.workloads.context import JobContext, Stop, Stopped

_POLL_S = 0.5


def fetched(context: JobContext) -> JobContext:
    """The same job with local copies of its inputs. Members of it on this machine share them.

    Raises DataError if an input is missing or changes meanwhile, and Stopped.
    """
    spec = context.spec
    origins = dict[str, Origin]()
    if is_address(spec.input.source):
        source = _copied(context, spec.input.source, "input", origins)
        spec = spec.model_copy(update={"input": spec.input.model_copy(update={"source": source})})
    if spec.train is not None and spec.train.validation is not None and is_address(spec.train.validation.source):
        source = _copied(context, spec.train.validation.source, "validation", origins)
        held_out = spec.train.validation.model_copy(update={"source": source})
        spec = spec.model_copy(update={"train": spec.train.model_copy(update={"validation": held_out})})
    return replace(context, spec=spec, origins=origins) if origins else context


def _copied(context: JobContext, address: str, which: str, origins: dict[str, Origin]) -> str:
    """Where the copy of an input lies; it is made if it is missing. Adds its origin."""
    context.report(phase="fetch")
    listing = list_objects(address, context.spec.input.format, context.patience.through)
    folder = folder_of(context.store.home, context.job.id) / which
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with exclusive(folder.with_suffix(".lock"), poll_s=_POLL_S, waiting=lambda _: _go_on(context)):
        _fetch(context, listing, folder)
    source = listing.source(folder)
    origins[source] = listing.origin(folder, address)
    return source


def _fetch(context: JobContext, listing: Listing, folder: Path) -> None:
    start, nbytes, objects = time.perf_counter(), 0, 0
    with closing(fetch(listing, folder, context.patience.through, boot=boot_id())) as sizes:
        for size in sizes:
            _go_on(context)
            nbytes, objects = nbytes + size, objects + 1
    took_s = time.perf_counter() - start
    said = f"{listing.address}: {count(len(listing.objects), 'object')}, {format_bytes(listing.nbytes)}"
    if objects:
        said += f"; fetched {format_bytes(nbytes)} in {format_duration(took_s)}"
    else:
        said += "; an earlier attempt or another device of this job has fetched them"
    context.event("fetched", said, {"objects": objects, "bytes": nbytes, "seconds": took_s})


def _go_on(context: JobContext) -> None:
    """Tell that the job moves. Raises Stopped if it is to end."""
    moves.made()
    if context.stop() is not Stop.GO:
        raise Stopped
