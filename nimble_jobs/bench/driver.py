"""Measures the units of a request, each model in one process, and saves the results after each unit. Loads no torch."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from nimble_jobs.bench.process import MODULE, Process, ProcessDied, TooLong
from nimble_jobs.bench.request import Request, Unit
from nimble_jobs.bench.results import Results
from nimble_jobs.bench.row import Row, failed
from nimble_jobs.errors import UsageError

_START_S = 300.0  # for importing torch, reaching the device and building the model


class _OutOfTime(Exception):
    """The time for the whole run is over."""


def run(
    request: Request,
    results: Results,
    *,
    log: Path,
    told: Callable[[str], None] = lambda _: None,
    kept: Callable[[Results], None] = lambda _: None,
    module: str = MODULE,
) -> bool:
    """Measure what `results` does not hold yet. `told` gets progress messages, `kept` the results after each unit.

    Returns True once every unit was measured or failed with a reason, False if `stop_after_s` ended the run earlier.
    Raises UsageError if the device does not exist or `results` come from another one, ProcessDied if the process that
    should name the device dies.
    """
    return _Run(request, results, log, told, kept, module).all()


class _Run:
    def __init__(
        self,
        request: Request,
        results: Results,
        log: Path,
        told: Callable[[str], None],
        kept: Callable[[Results], None],
        module: str,
    ) -> None:
        self._request = request
        self._results = results
        self._log = log
        self._told = told
        self._kept = kept
        self._module = module
        self._started = time.monotonic()
        self._process: Process | None = None
        self._adopted = False
        self._cuda = False

    def all(self) -> bool:
        try:
            self._open(self._request.models[0])  # names the device, which decides what the units are
            units = self._request.units(cuda=self._cuda)
            left = [u for u in units if not self._done(u)]
            self._told(f"{len(left)} of {len(units)} measurements to be made")
            count = 0
            for model, members in groupby(left, key=lambda unit: unit.model):
                if self._process is not None and model != self._request.models[0]:
                    self._close()
                for unit in members:
                    count += 1
                    self._one(unit, f"[{count}/{len(left)}]")
                self._close()
        except _OutOfTime:
            return False
        except TooLong:
            if self._seconds_left() <= 0:
                return False
            raise
        finally:
            if self._process is not None:
                self._process.kill()
        return True

    def _one(self, unit: Unit, position: str) -> None:
        begin = time.monotonic()
        rows: list[Row] = []
        why: str | None = None
        try:
            process = self._process or self._open(unit.model)
            process.ask(dataclasses.asdict(unit))
            healthy = self._gather(process, rows)
        except ProcessDied as e:
            healthy, why = False, str(e)
        except TooLong:
            healthy, why = False, f"over the time limit of {self._request.limit_s:g} s"
        if not healthy:
            self._kill()
        out_of_time = why is not None and self._seconds_left() <= 0
        if why is not None and not out_of_time:
            present = {row.system for row in rows}
            rows += failed(unit, (s for s in unit.systems if s not in present), why)
        self._results.add(rows)
        self._kept(self._results)
        if out_of_time:
            raise _OutOfTime
        self._told(f"{position} {unit}: {_in_words(rows)} ({time.monotonic() - begin:.0f} s)")

    def _gather(self, process: Process, rows: list[Row]) -> bool:
        """Append rows as they arrive, to the end of the unit. False if the process cannot measure any more."""
        deadline = time.monotonic() + self._request.limit_s
        while True:
            message = process.answer(min(deadline - time.monotonic(), self._seconds_left()))
            if "row" not in message:
                return not message["spent"]
            rows.append(Row(**message["row"]))

    def _done(self, unit: Unit) -> bool:
        return self._results.done(unit, self._request.in_flight, idle=self._request.idle and self._cuda)

    def _open(self, model: str) -> Process:
        """Start a process for a model. Its first answer is the environment."""
        options = dataclasses.asdict(self._request) | {"model": model}
        self._process = Process(options, self._log, module=self._module)
        answer = self._process.answer(min(_START_S, self._seconds_left()))
        if "refused" in answer:
            raise UsageError(answer["refused"])
        self._cuda = answer["cuda"]
        if not self._adopted:
            self._adopted = True
            self._results.adopt(answer["environment"])
            environment = self._results.environment
            self._told(f"on {environment['device']}, driver {environment['driver']}, {_versions(environment)}")
            if not self._cuda:
                self._told("torch sees no GPU: the figures are this CPU's, and say nothing about the schedules")
        return self._process

    def _close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None

    def _seconds_left(self) -> float:
        if self._request.stop_after_s is None:
            return float("inf")
        return self._request.stop_after_s - (time.monotonic() - self._started)


def _versions(environment: dict[str, object]) -> str:
    versions = environment["versions"]
    assert isinstance(versions, dict)
    return f"torch {versions['torch']}"


def _in_words(rows: list[Row]) -> str:
    parts = []
    for row in rows:
        if row.error is not None:
            what = row.error if len(row.error) < 120 else f"{row.error[:117]}..."
        elif row.replay_us is not None:
            what = f"{row.replay_us:.1f} µs"
        else:
            what = f"{row.records_per_s:,.0f}/s" if row.records_per_s else "-"
        name = row.system if row.in_flight is None else f"{row.in_flight} in flight"
        parts.append(f"{name} {what}")
    return ", ".join(dict.fromkeys(parts)) or "no rows"
