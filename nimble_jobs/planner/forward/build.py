"""From a module to a new schedule: search, keep the best, capture it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import nn

from nimble_jobs.engine import device as devices
from nimble_jobs.engine import measure, verify
from nimble_jobs.engine.capture import Instance
from nimble_jobs.engine.compact import compact, state_bytes
from nimble_jobs.engine.inputs import stand_out
from nimble_jobs.engine.observe import Observed
from nimble_jobs.engine.private.compilers import loading_compilers
from nimble_jobs.engine.random_states import RandomStates
from nimble_jobs.engine.record import Recording
from nimble_jobs.errors import CannotRecord, CheckFailed, NimbleError, first_line
from nimble_jobs.planner.forward.calls import example_of, observe_calls, random_like, takes, time_calls
from nimble_jobs.planner.forward.restore import source_of
from nimble_jobs.planner.forward.target import Example, ForwardTarget
from nimble_jobs.planner.keys.options import BuildOptions, options_of
from nimble_jobs.planner.keys.request import Request, tolerance_of
from nimble_jobs.planner.keys.roles import Role
from nimble_jobs.planner.lookup.obtain import BuildResult
from nimble_jobs.planner.lookup.siblings import Precedent
from nimble_jobs.planner.lookup.stored import Storable
from nimble_jobs.planner.module.limits import numbers_for
from nimble_jobs.planner.search.candidate import MeasuredCandidate, left_out
from nimble_jobs.planner.search.contest import Contest, against_eager, worth_a_contest
from nimble_jobs.planner.search.in_flight import InFlight
from nimble_jobs.planner.search.plans import may_compile
from nimble_jobs.planner.search.search import Search
from nimble_jobs.planner.search.summary import Summary, table
from nimble_jobs.planner.sources.source import AS_GIVEN
from nimble_jobs.schedule import Schedule

T = TypeVar("T")

_RATES = 3  # of replays in flight, held against eager
_BUDGET_S = min(0.1, measure.BUDGET_S)  # for a figure of a candidate that has no rival but eager


@dataclass(frozen=True, kw_only=True)
class Built:
    """A new schedule, its instances, and what must be stored beside it."""

    stored: Storable  # of no key parts yet
    recording: Recording
    instances: tuple[Instance, ...]  # as many as the schedule wants in flight; none if eager is faster
    module: nn.Module  # whose weights the instances read: the given one, or its folded copy
    observed: Observed  # the module, as it was before its first call

    @property
    def schedule(self) -> Schedule:
        return self.stored.schedule

    @property
    def failure(self) -> str | None:
        """Why no candidate passed the check against eager; None if one did."""
        return self.stored.refused

    @property
    def instance(self) -> Instance:
        """The first instance."""
        return self.instances[0]

    def close(self) -> None:
        """Give the memory of every instance back."""
        for instance in self.instances:
            instance.close()


def build_schedule(
    module: nn.Module,
    request: Request,
    key: str,
    device: torch.device,
    *,
    say: Callable[[str], None] = lambda _: None,
    precedent: Precedent | None = None,
) -> Built:
    """`build_best` for what a job asks for. `precedent` is a sibling whose choice is taken over, if it holds here."""
    example = example_of(request, module, device)
    options = replace(
        options_of(request.schedule),
        purpose="throughput",
        fold=True,
        tolerance=tolerance_of(request),
        memory_bytes=memory_left(request, module),
    )
    return build_best(module, {"x": example}, key, options, device, say=say, precedent=precedent)


def build_result(built: Built, parts: Mapping[str, str], value: T, *, meaning: str = "") -> BuildResult[T]:
    """A new schedule on its way into the store. One that failed its check is stored as refused, so that nobody builds
    it again; `meaning` begins the reason for eager then.
    """
    failure = None if built.failure is None else f"{meaning}{built.failure}"
    return BuildResult(value=value, storables=(replace(built.stored, parts=parts),), close=built.close, failure=failure)


def memory_left(request: Request, module: nn.Module) -> int | None:
    """Bytes of the user's limit that the module's state leaves; None if there is no limit."""
    return None if request.memory_bytes is None else max(0, request.memory_bytes - state_bytes(module))


def build_best(
    module: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    key: str,
    options: BuildOptions,
    device: torch.device,
    *,
    keep_integers: bool = False,
    observed: Observed | None = None,
    eager_us: float | None = None,
    say: Callable[[str], None] = lambda _: None,
    precedent: Precedent | None = None,
) -> Built:
    """The fastest schedule found for a module that lies on `device`, captured.

    `inputs` give names, shapes and dtypes; the first dimension of the first is the batch. The module's tensors and the
    random states keep their values, but weights may end up in another memory layout. If the schedule says that some are
    folded or merged, the copy in the answer takes the module's place.

    With `keep_integers`, checks use the integers of `inputs` in another order, instead of random ones. `observed` is
    what `observe_calls` found, and `eager_us` the time of a call in eager; None: found out here. `say` is given the
    name of each candidate before its turn. With a `precedent`, only its choice is tried, unless that fails here, or
    loses to eager here but not there. Raises CannotRecord if no schedule can hold what the module does, EngineError if
    it cannot be captured, OutOfMemory.
    """
    start, states = time.perf_counter(), RandomStates(device)
    first = next(iter(inputs.values()))
    batch = first.shape[0] if first.dim() else 1
    tolerance = options.tolerance if options.tolerance is not None else verify.tolerance_for(module, first)
    below = numbers_for(module)
    integers = stand_out(inputs) if keep_integers else {}
    example = {name: integers.get(name, random_like(tensor, below, device)) for name, tensor in inputs.items()}
    with _refusing(), contextlib.ExitStack() as before:
        loaded = before.enter_context(loading_compilers(_compiles(options, device, precedent)))
        if observed is None:
            observed = observe_calls(module, inputs if keep_integers else example, device, keep_integers=keep_integers)
        loaded()
        try:
            if keep_integers and not takes(module, example, observed):
                example, integers = dict(inputs), dict(inputs)
            if eager_us is None:
                budget_s = measure.figure_s(device) if precedent is None else _BUDGET_S
                eager_us = time_calls(lambda: module(*example.values()), device, observed, budget_s=budget_s)
            given = inputs if keep_integers else {}
            shown = Example(inputs=example, batch=batch, below=below, integers=integers, given=given)
            target = ForwardTarget(module, shown, options, device, tolerance=tolerance, observed=observed)
            build = _Build(target, options, key=key, eager_us=eager_us, start=start, say=say)
            before.close()  # the search ends the compilers
            return build.run(precedent)
        finally:
            observed.put_back()
            states.put_back()


def _compiles(options: BuildOptions, device: torch.device, precedent: Precedent | None) -> bool:
    """Whether a build tries kernels of a compiler."""
    searches = not options.quick and (precedent is None or source_of(precedent.schedule).compiled)
    return searches and bool(may_compile(options, device))


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Raises CannotRecord for whatever is no error of ours: the model may run in eager all the same."""
    try:
        yield
    except (NimbleError, torch.OutOfMemoryError):
        raise
    except Exception as e:
        raise CannotRecord(f"the model cannot be scheduled: {first_line(e)}") from e


class _Build:
    """From a target to its schedule, captured."""

    def __init__(
        self,
        target: ForwardTarget,
        options: BuildOptions,
        *,
        key: str,
        eager_us: float,
        start: float,
        say: Callable[[str], None],
    ) -> None:
        self._target = target
        self._options = options
        self._key = key
        self._eager_us = eager_us
        self._start = start
        self._say = say
        self._search = Search(target, options, say=say)
        self._precedent: Precedent | None = None  # whose choice was taken over

    def run(self, precedent: Precedent | None) -> Built:
        """Search, choose between the winner and eager, and capture the choice."""
        target, options = self._target, self._options
        try:
            winner, contest = (self._taken_over(precedent) if precedent is not None else None) or self._searched()
            stays_eager = contest is not None and contest.eager_wins
            target.use(AS_GIVEN if stays_eager else winner.source)
        except BaseException:
            target.close()
            target.use(AS_GIVEN)
            raise
        if not stays_eager:
            target.variants.settle()
        devices.release_free_memory(target.device)  # what the other candidates left behind
        if options.fold and not stays_eager:  # with `fold` nobody else has the weights
            compact(target.module, target.device)
        with self._search.clock.time("capture"):
            instances = () if stays_eager else target.capture_several(winner.only, winner.in_flight)
        error, failure = winner.error, winner.failure
        # The instance of a quick build is the one that the search has checked.
        for instance in instances if failure is None and not options.quick else ():
            error, failure = self._checked(instance, winner)
            if failure is not None:
                break
        devices.clear_workspaces(target.device)  # of the calls in eager
        return self._built(winner, instances, contest, error, failure)

    def _searched(self) -> tuple[MeasuredCandidate, Contest | None]:
        """The best of all candidates, and how it did against eager."""
        winner = self._search.run(only_first=self._options.quick)
        winner = self._search.timed(self._in_flight(winner, self._options))
        return winner, self._against_eager(winner) if winner.failure is None else None

    def _taken_over(self, precedent: Precedent) -> tuple[MeasuredCandidate, Contest | None] | None:
        """The candidate that was chosen for a sibling, and how it did against eager. None if it fails here, or if only
        here eager is faster; then a row of the next search says so.
        """
        schedule, target = precedent.schedule, self._target
        target.budget_s = _BUDGET_S
        winner = self._search.run_one(source_of(schedule), schedule.plan.streams)
        if winner is not None:
            if schedule.in_flight > 1:
                winner = self._in_flight(winner, replace(self._options, in_flight=schedule.in_flight))
            contest = self._against_eager(winner)
            if contest is None or not contest.eager_wins or schedule.runs == "eager":
                self._precedent = precedent
                return winner, contest
            target.use(AS_GIVEN)
        target.budget_s = measure.figure_s(target.device)
        name, before = f"as for {precedent.words}", self._search
        rows = [c for c in before.candidates if c.reason]
        reason = f"{rows[-1].name}: {rows[-1].reason}" if rows else "slower than eager"
        self._search = Search(target, self._options, say=self._say)
        self._search.candidates.append(left_out(name, f"not taken over: {reason}"))
        return None

    def _in_flight(self, winner: MeasuredCandidate, options: BuildOptions) -> MeasuredCandidate:
        """How many replays to keep in flight, and of which candidate, if records a second are what counts."""
        target = self._target
        wanted = options.purpose == "throughput" and not options.quick and winner.failure is None
        if not wanted or not devices.able(target.device).streams:
            return winner
        flights = InFlight(target, options, clock=self._search.clock, say=self._say, rows=self._search.candidates)
        return flights.most_records(winner, self._search.passed)

    def _against_eager(self, winner: MeasuredCandidate) -> Contest | None:
        """Eager and the winner, timed in turns; None if eager may not win, or is slower beyond doubt.

        A quick build has no contest, which would use up the instance that it keeps.
        """
        target, count = self._target, winner.in_flight
        once_us = target.records / winner.row.records_per_s * 1e6 if winner.row.records_per_s else 0.0
        if self._options.quick or not worth_a_contest(once_us, self._eager_us, self._options):
            return None
        target.use(winner.source)
        instances = target.capture_several(winner.only, count)
        inputs = target.example.inputs
        try:
            for instance in instances:
                for name, tensor in inputs.items():
                    instance.inputs[name].copy_(tensor)
            with self._search.clock.time("measure"), torch.no_grad():
                if count > 1:
                    rates = [measure.throughput_per_s(instances, target.device) for _ in range(_RATES)]
                    return Contest.of([self._eager_us], [1e6 / rate for rate in rates])
                return against_eager(
                    lambda: target.eager(*inputs.values()),
                    instances[0].replay,
                    target.device,
                    eager_us=self._eager_us,
                    as_given=winner.source.layout == "given",
                    **target.turns(),
                )
        finally:
            for instance in instances:
                instance.close()

    def _checked(self, instance: Instance, winner: MeasuredCandidate) -> tuple[float | None, str | None]:
        """The relative norm against eager, and why that is too much, if it is."""
        try:
            with self._search.clock.time("check"):
                return self._target.compare(instance, winner.only.recording.program.inputs), None
        except CheckFailed as e:
            return e.error, str(e)

    def _built(
        self,
        winner: MeasuredCandidate,
        instances: tuple[Instance, ...],
        contest: Contest | None,
        error: float | None,
        failure: str | None,
    ) -> Built:
        target = self._target
        eager_us = self._eager_us if contest is None else contest.eager_us
        nbytes = sum(i.bytes for i in instances) if instances else winner.row.peak_bytes or 0
        summary = Summary(
            winner=winner,
            contest=contest,
            candidates=table(
                self._search.candidates,
                winner,
                eager_us=eager_us,
                records=target.records,
                contest=contest,
                failure=failure,
                many=self._options.purpose == "throughput",
                precedent=self._precedent,
            ),
            tolerance=target.tolerance,
            error=error,
            device=target.device,
            build_s=time.perf_counter() - self._start,
            stages=self._search.clock.stages,
            precedent=self._precedent,
            memories={Role.FORWARD: nbytes},
        )
        stored = summary.storable(Role.FORWARD, {}, self._key, eager_us=eager_us, failure=failure)
        return Built(
            stored=stored,
            recording=winner.only.recording,
            instances=instances,
            module=target.module,
            observed=target.observed,
        )
