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
from nimble_jobs.planner.search.candidate import MeasuredCandidate, failed, left_out
from nimble_jobs.planner.search.clock import Clock
from nimble_jobs.planner.search.target import PlannedProgram
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

    def capture_several(self, planned: PlannedProgram, count: int) -> tuple[Instance, ...]: ...

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
        say: Callable[[str], None],
        rows: list[Candidate],
    ) -> None:
        self._target = target
        self._options = options
        self._clock = clock
        self._say = say
        self._rows = rows
        self._leader: MeasuredCandidate | None = None
        self._rate = 0.0  # records a second of the leader

    def most_records(self, single: MeasuredCandidate, passed: Sequence[MeasuredCandidate]) -> MeasuredCandidate:
        """The candidate with the most records a second among those that passed, with its number of replays in flight.

        Afterwards the weights lie as the candidate measured last needs them. Raises DeviceFault.
        """
        asked = self._options.in_flight
        if asked == "auto" or asked == 1:
            self._takes_lead(single, 1)
        if asked != 1:
            for measured in (single, *_one_stream(single, passed), *self._near(single, passed)):
                self._takes_lead(measured, 2 if asked == "auto" else asked)
        leader = self._leader or single
        if asked == "auto" and leader.in_flight > 1:
            for measured in (leader, *_one_stream(leader, passed)):
                for count in _MORE:
                    if not self._takes_lead(measured, count):
                        break  # more in flight would only take memory
        return self._leader or single

    def _near(self, single: MeasuredCandidate, passed: Sequence[MeasuredCandidate]) -> list[MeasuredCandidate]:
        """The best of each other source, unless it is far behind; then its row says so."""
        best_of: dict[Source, MeasuredCandidate] = {}
        for measured in sorted(passed, key=lambda each: each.cost):
            best_of.setdefault(measured.source, measured)
        best_of.pop(single.source, None)
        for measured in best_of.values():
            if measured.replay_us > _NEAR * single.replay_us and measured.row in self._rows:
                reason = f"more than {_NEAR} times as slow as {single.row.name}; not tried in flight"
                self._rows[self._rows.index(measured.row)] = replace(measured.row, reason=reason)
        return [each for each in best_of.values() if each.replay_us <= _NEAR * single.replay_us]

    def _takes_lead(self, measured: MeasuredCandidate, count: int) -> bool:
        """Measure a candidate with `count` replays in flight, and let it lead if it is faster by enough."""
        rate = self._records_per_s(measured, count)
        if rate is None or rate <= self._rate * (1 + _PAYS):
            return False
        self._leader, self._rate = replace(measured, in_flight=count, row=self._rows[-1]), rate
        return True

    def _records_per_s(self, measured: MeasuredCandidate, count: int) -> float | None:
        """Records a second with `count` replays in flight; None if they do not fit, or may not overlap."""
        name = f"{measured.row.name}, {count} in flight"
        program, limit = measured.only.recording.program, self._options.memory_bytes
        streams = measured.only.plan.streams
        written = names_written(program, (*program.state, *program.constants))
        assert measured.row.peak_bytes is not None
        needed, why_not = count * measured.row.peak_bytes, None
        if count > 1 and written:
            why_not = f"not tried: the model writes its own tensor {written[0]!r}"
        elif limit is not None and needed > limit:
            why_not = f"not tried: needs about {needed} bytes, more than it may use"
        if why_not is not None:
            self._rows.append(left_out(name, why_not, streams=streams))
            return None
        self._say(name)
        try:
            with self._clock.time("capture"):
                self._target.use(measured.source)
                instances = self._target.capture_several(measured.only, count)
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
        self._rows.append(replace(measured.row, name=name, records_per_s=rate, peak_bytes=nbytes))
        return rate


def _one_stream(measured: MeasuredCandidate, passed: Sequence[MeasuredCandidate]) -> list[MeasuredCandidate]:
    """The same source on one stream, if that is another plan: replays in flight fill the device without streams."""
    if measured.only.plan.streams == 1:
        return []
    return [each for each in passed if each.source == measured.source and each.only.plan.streams == 1][:1]
