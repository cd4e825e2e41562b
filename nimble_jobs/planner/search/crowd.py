"""Whether many streams fill the device, and so how kernels are chosen: by their time alone, or beside others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from nimble_jobs.kernel_switches import Kernel
from nimble_jobs.planner.keys.options import BuildOptions
from nimble_jobs.planner.search.candidate import CROWDED_STREAMS, MeasuredCandidate, failed, left_out
from nimble_jobs.planner.search.clock import Clock
from nimble_jobs.planner.search.plans import may_have_streams, plan_on_streams, too_large
from nimble_jobs.planner.search.target import Target
from nimble_jobs.planner.sources.source import Source
from nimble_jobs.schedule import Candidate

_EAGER_FILLS = 1.7  # times the critical path of eager's kernels, above which compiled ones fill the device, too
_STILL_FULL = 1.35  # times the critical path of kernels that are chosen for a full device


class Crowd:
    """How the kernels of one search are chosen: to compile them both ways takes twice as long."""

    def __init__(self, target: Target, options: BuildOptions, *, clock: Clock, rows: list[Candidate]) -> None:
        """`rows`: the table of candidates, which says what is left out."""
        self._target = target
        self._options = options
        self._clock = clock
        self._rows = rows
        self._full: str | None = None  # why the device will be full, if eager's kernels say so

    def ordered(
        self, first: MeasuredCandidate, sources: list[Source], timed: Callable[[MeasuredCandidate], MeasuredCandidate]
    ) -> tuple[MeasuredCandidate, list[Source]]:
        """`sources`, with kernels that are chosen beside others in the place of those chosen alone if eager's kernels
        fill the device on a few streams. `first` are these on one stream; the answer has the time of each of their
        tasks if that was needed, which `timed` adds.
        """
        if not self._worth_a_look(first, sources):
            return first, sources
        first = timed(first)
        try:
            with self._clock.time("measure"):
                self._full = self._filled(first)
        except Exception as e:  # noqa: BLE001 - its row says it
            name = f"{first.source.name}, a look at {CROWDED_STREAMS} streams"
            self._rows.append(failed(name, e, self._target.device))
        if self._full is None:
            return first, sources
        return first, [replace(each, kernels="crowded") if _chosen_alone(each) else each for each in sources]

    def other(self, tried: Sequence[Source], best: MeasuredCandidate) -> Source | None:
        """A source whose kernels are chosen in the other way than those of the sources tried; None if it cannot pay."""
        if self._full is None:
            alone = next(filter(_chosen_alone, tried), None)
            return replace(alone, kernels="crowded") if alone is not None and best.crowded else None
        beside = next((each for each in tried if each.kernels == "crowded"), None)
        if beside is None:
            return None  # it failed, and the search has tried the other one in its place
        alone = replace(beside, kernels="epilogues")
        if best.source != beside or not best.fills(_STILL_FULL):
            return alone
        took = f"{best.row.name} takes {best.replay_us:.0f} us, {best.over_path:.1f} times its critical path"
        self._rows.append(left_out(alone.name, f"not tried: {self._full}, and {took}"))
        return None

    def _worth_a_look(self, first: MeasuredCandidate, sources: Sequence[Source]) -> bool:
        """Whether eager's kernels could fill the device, and our kernels could be chosen for that."""
        if self._target.captures_take_long or len(first.programs) != 1 or not any(map(_chosen_alone, sources)):
            return False
        limit, facts = self._options.streams, first.only.facts
        most = facts.width if limit == "auto" else min(limit, facts.width)
        return most >= CROWDED_STREAMS and may_have_streams(facts, self._options, self._target.device)

    def _filled(self, first: MeasuredCandidate) -> str | None:
        """How much longer than their critical path eager's kernels take on a few streams, if that is much."""
        (role,) = first.programs
        path_us = first.only.facts.critical_path_us
        if not path_us or first.over_path <= _EAGER_FILLS:
            return None
        planned = plan_on_streams(first.only, CROWDED_STREAMS)
        limit = self._options.memory_bytes
        if planned.plan.streams < CROWDED_STREAMS or too_large({role: planned}, self._target.device, limit) is not None:
            return None
        us = self._target.alone_us(first.source, role, planned.recording, planned.plan)
        if us <= _EAGER_FILLS * path_us:
            return None
        times = f"{us / path_us:.1f} times their critical path"
        return f"eager kernels take {us:.0f} us on {CROWDED_STREAMS} streams, {times}"


def _chosen_alone(source: Source) -> bool:
    """Whether a source's kernels are chosen by their time alone, and may be chosen otherwise."""
    return source.kernels == "epilogues" and Kernel.CROWDED not in source.without
