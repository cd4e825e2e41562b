"""How many replays to keep in flight, and of which candidate: what gives most records a second.

The best single replay need not be the one that shares the device best with others of its kind. So the best plan of
each source that comes near it is measured with two in flight, and only what leads then with more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from nimble_jobs.engine import measure
from nimble_jobs.engine.capture import Instance
from nimble_jobs.graph.writes import names_written
from nimble_jobs.planner.keys.options import BuildOptions
from nimble_jobs.planner.search.candidate import Found, failed, left_out
from nimble_jobs.planner.search.clock import Clock
from nimble_jobs.planner.search.target import Planned
from nimble_jobs.planner.sources.source import Source
from nimble_jobs.schedule import Candidate, Port

_MORE = (4, 8)  # after two
_PAYS = 0.03  # what takes the lead must bring at least this share more
_NEAR = 1.5  # times as long as the best replay, above which a source is not tried in flight


class Repeatable(Protocol):
    """A target with one program, of which several instances can be captured."""

    @property
    def device(self) -> torch.device: ...

    @property
    def records(self) -> int: ...

    @property
    def budget_s(self) -> float:
        """Seconds to spend on one figure."""

    def use(self, source: Source) -> None: ...

    def capture_several(self, planned: Planned, count: int) -> tuple[Instance, ...]: ...

    def fill(self, instance: Instance, ports: tuple[Port, ...]) -> None:
        """Give an instance the next of several random inputs."""


class InFlight:
    """Measures replays in flight; `rows` gets a candidate for each try."""

    def __init__(
        self,
        target: Repeatable,
        options: BuildOptions,
        *,
        clock: Clock,
        told: Callable[[str], None],
        rows: list[Candidate],
    ) -> None:
        self._target = target
        self._options = options
        self._clock = clock
        self._told = told
        self._rows = rows
        self._best: Found | None = None
        self._rate = 0.0

    def most_records(self, single: Found, passed: Sequence[Found]) -> Found:
        """The candidate with the most records a second among those that passed, with its number of replays in flight.

        Afterwards the weights lie as the candidate measured last needs them. Raises DeviceFault.
        """
        asked = self._options.in_flight
        if asked == "auto" or asked == 1:
            self._leads(single, 1)
        if asked != 1:
            for found in (single, *_one_stream(single, passed), *self._near(single, passed)):
                self._leads(found, 2 if asked == "auto" else asked)
        leader = self._best or single
        if asked == "auto" and leader.in_flight > 1:
            for found in (leader, *_one_stream(leader, passed)):
                for count in _MORE:
                    if not self._leads(found, count):
                        break  # more in flight would only take memory
        return self._best or single

    def _near(self, single: Found, passed: Sequence[Found]) -> list[Found]:
        """The best of each other source, unless it is far behind; then its row says so."""
        best_of: dict[Source, Found] = {}
        for found in sorted(passed, key=lambda f: f.cost):
            best_of.setdefault(found.source, found)
        best_of.pop(single.source, None)
        for found in best_of.values():
            if found.replay_us > _NEAR * single.replay_us and found.candidate in self._rows:
                reason = f"more than {_NEAR} times as slow as {single.candidate.name}; not tried in flight"
                self._rows[self._rows.index(found.candidate)] = replace(found.candidate, reason=reason)
        return [f for f in best_of.values() if f.replay_us <= _NEAR * single.replay_us]

    def _leads(self, found: Found, count: int) -> bool:
        """Measure it; whether it brings enough more records a second than all before."""
        rate = self._measured(found, count)
        if rate is None or rate <= self._rate * (1 + _PAYS):
            return False
        self._best, self._rate = replace(found, in_flight=count, candidate=self._rows[-1]), rate
        return True

    def _measured(self, found: Found, count: int) -> float | None:
        """Records a second with `count` replays in flight; None if they do not fit, or may not overlap."""
        name = f"{found.candidate.name}, {count} in flight"
        program, limit = found.only.recording.program, self._options.memory_bytes
        streams = found.only.plan.streams
        written = names_written(program, (*program.state, *program.constants))
        if count > 1 and written:
            self._rows.append(
                left_out(name, f"not tried: the model writes its own tensor {written[0]!r}", streams=streams)
            )
            return None
        assert found.candidate.peak_bytes is not None
        needed = count * found.candidate.peak_bytes
        if limit is not None and needed > limit:
            self._rows.append(
                left_out(name, f"not tried: needs about {needed} bytes, more than it may use", streams=streams)
            )
            return None
        self._told(name)
        try:
            with self._clock.time("capture"):
                self._target.use(found.source)
                instances = self._target.capture_several(found.only, count)
            try:
                with self._clock.time("measure"):
                    for instance in instances:
                        self._target.fill(instance, program.inputs)
                    budget_s, device = self._target.budget_s, self._target.device
                    rate = measure.throughput_per_s(instances, device, budget_s=budget_s) * self._target.records
                nbytes = sum(i.bytes for i in instances)
            finally:
                for instance in instances:
                    instance.close()
        except Exception as e:  # noqa: BLE001 - one replay at a time works, whatever this is
            self._rows.append(failed(name, e, self._target.device, streams=streams))
            return None
        self._rows.append(replace(found.candidate, name=name, records_per_s=rate, peak_bytes=nbytes))
        return rate


def _one_stream(found: Found, passed: Sequence[Found]) -> list[Found]:
    """The same source on one stream, if that is another plan: replays in flight fill the device without streams."""
    if found.only.plan.streams == 1:
        return []
    return [f for f in passed if f.source == found.source and f.only.plan.streams == 1][:1]
