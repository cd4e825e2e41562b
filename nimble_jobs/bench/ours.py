"""Our own rows: the planner's search gives all candidates; the chosen one is timed here, as everything else is."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal, cast

import torch

from nimble_jobs.bench import in_flight
from nimble_jobs.bench.cell import Cell
from nimble_jobs.bench.figures import figures
from nimble_jobs.bench.memory import Meter
from nimble_jobs.bench.request import CONTIGUOUS, OURS, OURS_MANY, OURS_ONE, Unit
from nimble_jobs.bench.row import Row, blank, failed, in_words
from nimble_jobs.bench.runners import StaticRunner
from nimble_jobs.bench.settings import Settings
from nimble_jobs.engine.device import synchronize
from nimble_jobs.errors import EngineError
from nimble_jobs.planner.forward.build import build_best
from nimble_jobs.planner.keys.options import BuildOptions
from nimble_jobs.schedule import Candidate, Schedule


def rows(cell: Cell, unit: Unit, settings: Settings) -> Iterator[Row]:
    """The best single stream, the best on many, the chosen one, and that one so many times in flight.

    The first two are the planner's measurements of candidates that it has let go of; so is `built_replay_us` of the
    chosen one, with which they compare.
    """
    module = cell.own_module()  # the search lays its weights out as the winner needs them
    inputs = cell.inputs(CONTIGUOUS)[0]
    cell.ready(CONTIGUOUS)
    meter = Meter(cell.device)
    meter.start()
    begin = time.perf_counter()
    options = dataclasses.replace(options_of(settings), fold=True, tolerance=cell.tolerance)
    built = build_best(module, inputs, "benchmark", options, cell.device)
    synchronize(cell.device)
    prepare_s = time.perf_counter() - begin
    del module  # where some of its weights were folded, its twin takes its place
    try:
        ready = of_search(unit, built.schedule, prepare_s, meter)
        yield from of_candidates(unit, built.schedule.candidates, cell.tolerance)
        if built.failure is not None:
            yield from failed(unit, [OURS], built.failure)
            return
        instance = built.instance
        runner = StaticRunner(instance.replay, instance.inputs, lambda: instance.outputs)
        yield dataclasses.replace(ready, **figures(cell, runner, CONTIGUOUS, settings, meter))
        built.close()  # in-flight instances come and go, and with them workspaces that it may have captured
        for number in settings.in_flight:
            try:
                yield in_flight.row(cell, unit, built, number, settings.sample_s)
            except (EngineError, torch.OutOfMemoryError) as e:
                yield dataclasses.replace(failed(unit, [OURS], in_words(e))[0], in_flight=number)
    finally:
        built.close()


def options_of(settings: Settings) -> BuildOptions:
    """How we search: with every candidate measured, eager among them for comparison alone."""
    fuse = cast(Literal["auto", "off", "max"], settings.fuse)
    return BuildOptions(fuse=fuse, budget_s=settings.search_s, eager="reference")


def of_search(unit: Unit, schedule: Schedule, prepare_s: float, meter: Meter) -> Row:
    """The row of the chosen schedule, before it is timed."""
    return dataclasses.replace(
        blank(unit, OURS),
        prepare_s=prepare_s,
        build_peak_bytes=meter.built(),
        facts=facts_of(schedule),
        candidates=[dataclasses.asdict(c) for c in schedule.candidates],
        note=next((c.name for c in schedule.candidates if c.chosen), None),
    )


def of_candidates(unit: Unit, candidates: Sequence[Candidate], tolerance: float) -> list[Row]:
    """The fastest right candidate on one stream, and on more; without figures if there was none to measure."""
    return [_fastest(unit, system, candidates, tolerance, many=system == OURS_MANY) for system in (OURS_ONE, OURS_MANY)]


def _fastest(unit: Unit, system: str, candidates: Sequence[Candidate], tolerance: float, *, many: bool) -> Row:
    fitting = [
        (c.replay_us, c)
        for c in candidates
        if c.replay_us and c.error is not None and c.error <= tolerance and _on_many(c) is many
    ]
    if not fitting:
        reasons = [c.reason for c in candidates if _on_many(c) is many or "several streams" in c.name]
        return dataclasses.replace(blank(unit, system), note="; ".join(reasons) or "no such candidate")
    replay_us, best = min(fitting, key=lambda pair: pair[0])
    return dataclasses.replace(
        blank(unit, system),
        replay_us=replay_us,
        records_per_s=unit.batch / replay_us * 1e6,
        peak_bytes=best.peak_bytes,
        relative_norm=best.error,
        note=best.name,
    )


def _on_many(candidate: Candidate) -> bool | None:
    """Whether it has more than one stream; None where nothing was planned."""
    return candidate.streams > 1 if candidate.streams is not None else None


def facts_of(schedule: Schedule) -> dict[str, Any]:
    """What the graph is like, how far its replay is from the bounds, and where the time of the build went."""
    facts = dataclasses.asdict(schedule.facts)
    path, work = schedule.facts.critical_path_us, schedule.facts.total_work_us
    return facts | {
        "built_replay_us": schedule.replay_us,
        "eager_us": schedule.eager_us,
        "over_critical_path": schedule.replay_us / path if path else None,
        "over_total_work": schedule.replay_us / work if work else None,
        "planned_bytes": schedule.peak_bytes,
        "build_s": schedule.build_s,
        "build_stages_s": dict(schedule.stages),
    }
