"""From a module to a new schedule: search, keep the best, capture it."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import nn

from nimble_jobs.engine import device as devices
from nimble_jobs.engine import measure, verify
from nimble_jobs.engine.capture import Instance
from nimble_jobs.engine.compact import compact
from nimble_jobs.engine.inductor import stop_compilers
from nimble_jobs.engine.inputs import Below, draw, like, stand_out, varied
from nimble_jobs.engine.observe import Observed, observe
from nimble_jobs.engine.private import clear_workspaces
from nimble_jobs.engine.record import Recording
from nimble_jobs.engine.state import RandomStates, state_bytes
from nimble_jobs.engine.static_kernel import pack
from nimble_jobs.errors import CannotRecord, NimbleError, first_line
from nimble_jobs.planner.forward.search import Search
from nimble_jobs.planner.keys.options import BUDGET_S, BuildOptions
from nimble_jobs.planner.keys.request import Request, tolerance_of
from nimble_jobs.planner.lookup.obtain import Fresh
from nimble_jobs.planner.lookup.stored import Storable
from nimble_jobs.planner.module.limits import numbers_for
from nimble_jobs.planner.search.candidate import PAYS, Found
from nimble_jobs.planner.search.contest import eager_counts
from nimble_jobs.planner.search.plans import capture_several
from nimble_jobs.schedule import Candidate, Schedule

T = TypeVar("T")

_SCALES = (1.0, 1e-6, 1e4, 0.0)  # of random input


@dataclass(frozen=True, kw_only=True)
class Built:
    """A new schedule, its instance, and the constants that must be stored beside it."""

    schedule: Schedule
    instances: tuple[Instance, ...]  # as many as the schedule wants in flight; none where eager is faster
    recording: Recording
    module: nn.Module  # whose weights the instances read: the given one, or its folded copy
    binaries: bytes  # machine code of its kernels, in one piece; empty where they need their compiler, or are operators
    failure: str | None  # why no candidate passed the check against eager; None where one did
    observed: Observed  # the module, as it was before its first call

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
    told: Callable[[str], None] = lambda _: None,
) -> Built:
    """`build_best` for what a job asks for."""
    example = example_of(request, module, device)
    options = BuildOptions(
        streams=request.schedule.streams,
        fuse=request.schedule.fuse,
        purpose="throughput",
        fold=True,
        in_flight=request.schedule.in_flight,
        tolerance=tolerance_of(request),
        budget_s=request.schedule.budget or BUDGET_S,
        memory_bytes=memory_left(request, module),
    )
    return build_best(module, {"x": example}, key, options, device, told=told)


def fresh(built: Built, parts: Mapping[str, str], value: T, *, meaning: str = "") -> Fresh[T]:
    """A new schedule on its way into the store. One that failed its check is stored as refused, so that nobody builds
    it again; `meaning` begins the reason for eager then.
    """
    storable = Storable(
        schedule=built.schedule,
        parts=parts,
        constants=built.recording.constants,
        binaries=built.binaries,
        refused=built.failure,
    )
    failure = None if built.failure is None else f"{meaning}{built.failure}"
    return Fresh(value=value, storables=(storable,), close=built.close, failure=failure)


def memory_left(request: Request, module: nn.Module) -> int | None:
    """Bytes of the user's limit that the module's state leaves; None where there is no limit."""
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
    told: Callable[[str], None] = lambda _: None,
) -> Built:
    """The fastest schedule found for a module that lies on `device`, captured.

    `inputs` give names, shapes and dtypes; the first dimension of the first is the batch. The weights may end up in
    another memory layout, as the schedule says; where it says that some are folded, the module is not needed any more,
    and its twin in the answer takes its place. With `keep_integers` checks use the integers of `inputs`, in another
    order, instead of random ones. The module's tensors and the random states are left as they were. `observed`, where
    given, is what `observe_calls` found before, and `eager_us` what a call in eager takes. `told` is called with the
    name of each candidate as it is begun. Raises CannotRecord where the module does what no schedule can hold,
    EngineError where it cannot be captured, OutOfMemory.
    """
    start, states = time.perf_counter(), RandomStates(device)
    first = next(iter(inputs.values()))
    batch = first.shape[0] if first.dim() else 1
    tolerance = options.tolerance if options.tolerance is not None else tolerance_for(module, first)
    below = numbers_for(module)
    integers = stand_out(inputs) if keep_integers else {}
    example = {name: integers.get(name, _random_like(tensor, below, device)) for name, tensor in inputs.items()}
    with _refusing():
        if observed is None:
            observed = observe_calls(module, inputs if keep_integers else example, device, keep_integers=keep_integers)
        try:
            if keep_integers and not _takes(module, example, observed):
                example, integers = dict(inputs), dict(inputs)
            if eager_us is None:
                eager_us = time_calls(lambda: module(*example.values()), device, observed)
            search = Search(
                module,
                example,
                options,
                device,
                batch=batch,
                tolerance=tolerance,
                below=below,
                integers=integers,
                eager_us=eager_us if eager_counts(options) else None,
                observed=observed,
                given=inputs if keep_integers else {},
                told=told,
            )
            return _built(search, key, options, device, batch=batch, eager_us=eager_us, start=start)
        finally:
            observed.put_back()
            states.put_back()


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Raises CannotRecord for whatever is no error of ours: the model may run in eager all the same."""
    try:
        yield
    except (NimbleError, torch.OutOfMemoryError):
        raise
    except Exception as e:
        raise CannotRecord(f"the model cannot be scheduled: {first_line(e)}") from e


def _built(
    search: Search, key: str, options: BuildOptions, device: torch.device, *, batch: int, eager_us: float, start: float
) -> Built:
    found = search.run()
    chosen = found.module
    assert chosen is not None  # the search is over
    if device.type == "cuda":
        stop_compilers()
        torch.cuda.empty_cache()  # what the other candidates left behind
    in_turns = search.contest
    stays_eager = in_turns is not None and in_turns.eager_wins
    if options.fold and not stays_eager:  # the weights are nobody else's
        compact(chosen, device)
    with search.clock.time("capture"):
        instances = (
            ()
            if stays_eager
            else capture_several(found.recording, found.plan, chosen, device, found.in_flight, found.memory)
        )
    error, failure = found.error, found.failure
    for instance in instances if failure is None else ():
        error, failure = search.check(instance, found.recording)
        if failure is not None:
            break
    if device.type == "cuda":
        clear_workspaces()  # of the calls in eager
    compiled, binaries = pack(found.recording.kernels) or ((), b"")
    schedule = Schedule(
        key=key,
        program=found.recording.program,
        plan=found.plan,
        facts=found.facts,
        offsets=found.memory.offsets,
        arena_bytes=found.memory.peak_bytes,
        durations_us=found.durations_us,
        kernels=found.source.kernels,
        layout=found.source.layout,
        folded=found.source.folded,
        merged=found.source.merged,
        compiled=compiled,
        binaries=hashlib.sha256(binaries).hexdigest() if binaries else None,
        in_flight=found.in_flight,
        candidates=_candidates(search, found, failure, eager_us, batch, options),
        runs="eager" if stays_eager else "schedule",
        noise=in_turns.noise if in_turns is not None else None,
        tolerance=search.tolerance,
        error=error,
        device=devices.describe(device),
        eager_us=eager_us if in_turns is None else in_turns.eager_us,
        replay_us=found.replay_us if in_turns is None or found.in_flight > 1 else in_turns.replay_us,
        peak_bytes=sum(i.bytes for i in instances) if instances else found.candidate.peak_bytes or 0,
        build_s=time.perf_counter() - start,
        stages=search.clock.stages,
    )
    return Built(
        schedule=schedule,
        instances=instances,
        recording=found.recording,
        module=chosen,
        binaries=binaries,
        failure=failure,
        observed=search.observed,
    )


def observe_calls(
    module: nn.Module, inputs: Mapping[str, torch.Tensor], device: torch.device, *, keep_integers: bool = True
) -> Observed:
    """`observe` with a few inputs like those given: random ones, at several scales, and factors of their own values.

    Raises CannotRecord.
    """
    below, integers = numbers_for(module), stand_out(inputs) if keep_integers else {}
    others = []
    for turn, scale in enumerate(_SCALES):
        drawn = {}
        generator = torch.Generator().manual_seed(turn)
        for name, tensor in inputs.items():
            if name in integers:
                drawn[name] = varied(tensor.detach().cpu(), generator, turn).to(device)
            else:
                drawn[name] = draw(tensor.shape, tensor.dtype, below, generator=generator, scale=scale).to(device)
        others.append(drawn)
    return observe(module, inputs, [*others, like(inputs, 0.5)], device)


def _takes(module: nn.Module, inputs: Mapping[str, torch.Tensor], observed: Observed) -> bool:
    """Whether the module can be called with these inputs."""
    try:
        with torch.no_grad():
            module(*(t.clone() for t in inputs.values()))
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001 - whatever it is, the caller has inputs that it can be called with
        return False
    finally:
        observed.put_back()
    return True


def time_calls(call: Callable[[], object], device: torch.device, observed: Observed) -> float:
    """`measure.time_us` of a call that may change the module: then each sample is one call from the same state."""
    with torch.no_grad():
        try:
            if observed.changing:
                return measure.time_us(call, device, before=observed.put_back, most=1)
            return measure.time_us(call, device)
        finally:
            observed.put_back()


def tolerance_for(module: nn.Module, example: torch.Tensor) -> float:
    """The default of the narrowest floating type among a module's parameters and its input."""
    names = {torch.float16: "fp16", torch.bfloat16: "bf16"}
    kinds = {p.dtype for p in module.parameters()} | {example.dtype}
    return max(verify.TOLERANCE[names.get(kind, "fp32")] for kind in kinds)


def example_of(request: Request, module: nn.Module, device: torch.device) -> torch.Tensor:
    """A batch that a request's model can take: random numbers."""
    empty = torch.empty(request.input_shape, dtype=request.input_dtype, device=device)
    return _random_like(empty, numbers_for(module), device)


def _random_like(tensor: torch.Tensor, below: Below, device: torch.device) -> torch.Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.empty_like(tensor, device=device).copy_(draw(tensor.shape, tensor.dtype, below, device=device))
    return draw(tensor.shape, tensor.dtype, below, device=device)


def _candidates(
    search: Search, found: Found, failure: str | None, eager_us: float, batch: int, options: BuildOptions
) -> tuple[Candidate, ...]:
    """Everything that was tried, with eager in front and the winner marked."""
    in_turns = search.contest
    stays_eager = in_turns is not None and in_turns.eager_wins
    eager_us = eager_us if in_turns is None else in_turns.eager_us
    said = "the reference"
    if failure is not None:
        said += "; runs because no candidate passed its check"
    elif in_turns is not None and stays_eager:
        said += f"; {in_turns.over(found.candidate.name)}"
    eager = Candidate(
        name="eager",
        replay_us=eager_us,
        records_per_s=batch / eager_us * 1e6,
        peak_bytes=None,
        error=0.0,
        chosen=failure is not None or stays_eager,
        reason=said,
    )
    many = options.purpose == "throughput"
    won = "the most records a second" if many else "the least time, weighed with its memory,"
    won += " of those that passed their check"
    tried = [
        replace(c, chosen=not stays_eager, reason=f"{won}; slower than eager" if stays_eager else won)
        if c == found.candidate and failure is None
        else replace(c, reason=c.reason or _why_not(c, found.candidate, many=many))
        for c in search.candidates
    ]
    return (eager, *tried)


def _why_not(candidate: Candidate, winner: Candidate, *, many: bool) -> str:
    if (candidate.records_per_s or 0.0) > (winner.records_per_s or 0.0):
        if (candidate.records_per_s or 0.0) * PAYS < (winner.records_per_s or 0.0):
            return f"within the noise of {winner.name}"
        return f"not enough faster than {winner.name} for its share of the memory"
    return f"fewer records a second than {winner.name}" if many else f"slower than {winner.name}"
