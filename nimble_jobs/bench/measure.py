"""Measure one unit: prepare, check, time, weigh. One row a system, as soon as it is known."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import time
import traceback
from collections.abc import Iterator

import torch

from nimble_jobs.bench import ours, systems, training_ours, training_systems
from nimble_jobs.bench.cell import Cell
from nimble_jobs.bench.figures import figures
from nimble_jobs.bench.memory import Meter, tidy
from nimble_jobs.bench.request import Unit
from nimble_jobs.bench.row import Row, blank, failed, in_words
from nimble_jobs.bench.runners import Runner
from nimble_jobs.bench.settings import Settings
from nimble_jobs.bench.training_cell import TrainingCell
from nimble_jobs.engine.device import synchronize
from nimble_jobs.engine.private.runtime import forget_compiled

_OWN_ALLOCATOR = ("onnxruntime", "tensorrt")
_COMPILES = ("compile", "ours")


def measure(cell: Cell | TrainingCell, unit: Unit, settings: Settings) -> Iterator[Row]:
    """Rows of the unit's systems. Whatever a system raises becomes the error of its rows; nothing is raised."""
    missing = list(unit.systems)
    compiles = unit.family.startswith(_COMPILES)
    try:
        with _caches(unit.family, cold=settings.cold_caches) if compiles else contextlib.nullcontext():
            for row in _rows(cell, unit, settings):
                if row.in_flight is None:
                    missing.remove(row.system)
                yield dataclasses.replace(row, caches=_caches_word(settings) if compiles else None)
    except Exception as e:  # noqa: BLE001  # a benchmark reports what happens to others' systems, whatever it is
        traceback.print_exc()
        yield from failed(unit, missing, in_words(e))
    finally:
        forget_compiled()
        with contextlib.suppress(RuntimeError):  # after a fault of the device; `faulted` tells
            tidy(cell.device)


def faulted(device: torch.device) -> bool:
    """Whether the device's context can be used no more."""
    try:
        synchronize(device)
    except RuntimeError:
        return True
    return False


def _rows(cell: Cell | TrainingCell, unit: Unit, settings: Settings) -> Iterator[Row]:
    if isinstance(cell, TrainingCell):
        training_systems.require_device(unit.family, cell)
        if not cell.expecting:
            cell.expect(training_systems.reference(cell))
    if unit.family == "ours":
        rows = training_ours.rows if isinstance(cell, TrainingCell) else ours.rows
        yield from rows(cell, unit, settings)  # type: ignore[arg-type]  # each for its own kind of cell
        return
    meter = Meter(cell.device)
    cell.ready(unit.layout)
    meter.start()
    prepare = training_systems.prepare if isinstance(cell, TrainingCell) else systems.prepare
    ready: Iterator[tuple[str, Runner]] = prepare(unit.family, cell, unit.layout)  # type: ignore[arg-type]
    spent_s = 0.0
    while True:
        begin = time.perf_counter()
        found = next(ready, None)
        synchronize(cell.device)
        spent_s += time.perf_counter() - begin
        if found is None:
            return
        name, runner = found
        try:
            prepared = dataclasses.replace(blank(unit, name), prepare_s=spent_s, build_peak_bytes=meter.built())
            measured = figures(cell, runner, unit.layout, settings, meter, own_allocator=name in _OWN_ALLOCATOR)
            yield dataclasses.replace(prepared, **measured)
        finally:
            runner.close()


def _caches_word(settings: Settings) -> str:
    return "cold" if settings.cold_caches else "shared"


@contextlib.contextmanager
def _caches(family: str, *, cold: bool) -> Iterator[None]:
    """Inside, compilers do not reuse choices made by time, which another process may have measured on a busy device.

    With `cold`, they do not reuse code that earlier systems or runs left on disk either.
    """
    if cold:
        from torch._inductor.utils import fresh_cache

        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, fresh_cache(dir=folder):
            yield
        return
    from torch._inductor import config

    changes: dict[str, object] = {"autotune_local_cache": False}
    if "max-autotune" in family:
        changes["fx_graph_cache"] = False  # it holds what was chosen
    with config.patch(changes):
        yield
