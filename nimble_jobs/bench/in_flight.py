"""Throughput: several instances of one schedule, each replayed on a stream of its own, in turn."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from nimble_jobs import graph
from nimble_jobs.bench.cell import Cell
from nimble_jobs.bench.memory import Meter
from nimble_jobs.bench.request import CONTIGUOUS, OURS, Unit
from nimble_jobs.bench.row import Row, blank
from nimble_jobs.engine.capture import Instance
from nimble_jobs.engine.device import synchronize
from nimble_jobs.engine.launch import flight_streams
from nimble_jobs.planner.forward.build import Built
from nimble_jobs.planner.search.plans import capture_several
from nimble_jobs.plural import count
from nimble_jobs.schedule import Plan

_SAMPLES = 5
_MOST_CALLS = 4000  # in one sample


def row(cell: Cell, unit: Unit, built: Built, number: int, sample_s: float) -> Row:
    """Records a second with `number` replays in flight: of the chosen plan, or of one stream each where that is more.

    Raises EngineError where it cannot be captured again, OutOfMemory.
    """
    plans = [built.schedule.plan]
    if built.schedule.plan.streams > 1:
        plans.append(graph.single_stream(built.schedule.program, durations_us=built.schedule.durations_us or None)[0])
    found = [_of_plan(cell, unit, built, plan, number, sample_s) for plan in plans]
    return max(found, key=lambda row: row.records_per_s or 0.0)


def _of_plan(cell: Cell, unit: Unit, built: Built, plan: Plan, number: int, sample_s: float) -> Row:
    cuda = cell.device.type == "cuda"
    meter = Meter(cell.device)
    meter.start()
    instances = capture_several(built.recording, plan, built.module, cell.device, number)
    try:
        meter.settle()
        streams = flight_streams(cell.device, number) if cuda else []
        on_host = cell.inputs_on_host(CONTIGUOUS)
        back = [_host_outputs(instance, pin=cuda) for instance in instances]
        for instance in instances:
            _copy_in(instance, on_host[0])

        def replay(turn: int) -> None:
            instances[turn % number].replay()

        def with_copies(turn: int) -> None:
            instance = instances[turn % number]
            _copy_in(instance, on_host[turn % len(on_host)])
            instance.replay()
            for target, output in zip(back[turn % number], instance.outputs.values(), strict=True):
                target.copy_(output, non_blocking=True)

        return dataclasses.replace(
            blank(unit, OURS),
            in_flight=number,
            records_per_s=rate(replay, streams, device=cell.device, batch=unit.batch, sample_s=sample_s),
            records_per_s_with_copies=rate(
                with_copies, streams, device=cell.device, batch=unit.batch, sample_s=sample_s
            ),
            peak_bytes=meter.running(),
            note=f"{count(plan.streams, 'stream')} each",
        )
    finally:
        for instance in instances:
            instance.close()


def _copy_in(instance: Instance, inputs: dict[str, torch.Tensor]) -> None:
    for buffer, given in zip(instance.inputs.values(), inputs.values(), strict=True):
        buffer.copy_(given, non_blocking=True)


def _host_outputs(instance: Instance, *, pin: bool) -> list[torch.Tensor]:
    return [torch.empty_like(t, device="cpu", pin_memory=pin) for t in instance.outputs.values()]


def rate(
    call: Callable[[int], object],
    streams: Sequence[torch.cuda.Stream],
    *,
    device: torch.device,
    batch: int,
    sample_s: float,
) -> float:
    """Records a second by the host's clock, from the first launch to the last end; a median.

    `call` gets the number of the turn; turns go round `streams`. `sample_s`: seconds for all samples.
    """

    def many(calls: int) -> float:
        synchronize(device)
        begin = time.perf_counter()
        for turn in range(calls):
            if streams:
                with torch.cuda.stream(streams[turn % len(streams)]):
                    call(turn)
            else:
                call(turn)
        synchronize(device)
        return time.perf_counter() - begin

    turns = 4 * max(1, len(streams))
    many(turns)
    once = many(turns) / turns
    calls = max(turns, min(_MOST_CALLS, int(sample_s / once / _SAMPLES)))
    return calls * batch / median(many(calls) for _ in range(_SAMPLES))
