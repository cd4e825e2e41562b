"""One prepared signature without gradients: copy in, replay, copy out."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import torch
from torch import nn

from nimble_jobs.engine import device as devices
from nimble_jobs.engine.capture import Instance
from nimble_jobs.engine.observe import Observed
from nimble_jobs.engine.private.tensors import tree_flatten, tree_unflatten
from nimble_jobs.errors import CheckFailed, UsageError
from nimble_jobs.job import Hit
from nimble_jobs.nimble.flat import Structure, flat
from nimble_jobs.nimble.guard import Choice, Guard, changed_by_calls
from nimble_jobs.nimble.layout import Layouts, refusing_copies
from nimble_jobs.nimble.order import order_is_free
from nimble_jobs.nimble.signature import Args, Kwargs, Signature
from nimble_jobs.nimble.stored import load
from nimble_jobs.nimble.writes import meeting_state, names_written, refuse_shared, written_inputs
from nimble_jobs.planner.forward.build import Built, build_best, build_result
from nimble_jobs.planner.forward.calls import observe_calls
from nimble_jobs.planner.forward.restore import Restored
from nimble_jobs.planner.keys.options import BuildOptions, option_parts
from nimble_jobs.planner.keys.request import schedule_key
from nimble_jobs.planner.lookup.obtain import BuildResult, obtain
from nimble_jobs.planner.lookup.stored import Obtained
from nimble_jobs.planner.module.modes import eval_mode, own_modes
from nimble_jobs.planner.module.restoring import restoring_state
from nimble_jobs.planner.sources.source import Source, record_source
from nimble_jobs.schedule import FORMAT_VERSION, Program, Schedule
from nimble_jobs.store import Store


@dataclass(kw_only=True)
class Inference:
    """A schedule and its instances, which take turns."""

    signature: Signature
    hit: Hit  # whether the schedule was found in the store
    schedule: Schedule
    structure: Structure
    instances: tuple[Instance, ...]
    guard: Guard | None
    written: tuple[str, ...]  # inputs that the model writes into
    layouts: Layouts | None  # None if any will do
    meeting: dict[str, torch.Tensor]  # the module's own tensors that inputs must not share memory with
    device: torch.device
    any_order: bool  # of keys in dicts among the arguments
    training = False
    fallback = None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._turns = itertools.cycle(self.instances)
        # What a replay writes cannot be taken back, and on a CPU nothing is gained by asking afterwards.
        program = self.schedule.program
        self._asks_first = not devices.able(self.device).asynchronous or bool(self.written or names_written(program))
        self._done = {id(i): torch.cuda.Event() for i in self.instances if devices.able(self.device).streams}

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        return self.instances[0].inputs

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        return self.instances[0].outputs

    def replay(self) -> None:
        self.instances[0].replay()

    def run(self, tensors: list[torch.Tensor]) -> Any:
        """The model's outputs for these inputs, as tensors of their own. Raises UsageError as `refuse_shared`, and
        ModuleChanged.
        """
        if self.guard is not None and self._asks_first:
            self.guard.check()
        refuse_shared(self.signature, tensors, self.written, self.meeting)
        if self.layouts is not None:
            self.layouts.check(tensors)
        with self._lock, torch.no_grad():
            instance = next(self._turns)
            done = self._done.get(id(instance))
            if done is not None:  # the last call of this instance may have been made on another stream
                torch.cuda.current_stream(self.device).wait_event(done)
            for static, given in zip(instance.inputs.values(), tensors, strict=True):
                static.copy_(given)
            instance.replay()
            outputs = instance.outputs
            own = [outputs[name].clone() for name in self.structure.names]
            for slot, given in zip(self.signature.tensors, tensors, strict=True):
                if slot.name in self.written:
                    given.copy_(instance.inputs[slot.name])
            if done is not None:
                done.record(torch.cuda.current_stream(self.device))
        if self.guard is not None and not self._asks_first:
            self.guard.check()  # a GPU is at work meanwhile
        return self.structure.build(own)

    def close(self) -> None:
        for instance in self.instances:
            instance.close()


@dataclass(kw_only=True)
class Eager:
    """A signature for which the model itself is called: there is no schedule, or eager is faster than it."""

    signature: Signature
    module: nn.Module
    fallback: str | None = None
    schedule: Schedule | None = None
    backward_schedule: Schedule | None = None
    hit: Hit = Hit.MISS
    training: bool = False
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)

    def run(self, tensors: list[torch.Tensor]) -> Any:
        args, kwargs = self.signature.arguments(tuple(tensors))
        return self.call(args, kwargs)

    def call(self, args: Args, kwargs: Kwargs) -> Any:
        """The module's own outputs for the caller's own arguments, whose lists and dicts it may change.

        Where eager was chosen, outputs without gradients are copies, as a replay's are, also of the module's own state.
        """
        if self.training:
            with own_modes(self.module):
                return self.module(*args, **kwargs)
        with eval_mode(self.module), torch.no_grad():
            result = self.module(*args, **kwargs)
            if self.fallback is not None:
                return result
            leaves, nesting = tree_flatten(result)
            return tree_unflatten([v.clone() if isinstance(v, torch.Tensor) else v for v in leaves], nesting)

    def close(self) -> None:
        self.module = nn.Identity()


def prepare(
    module: nn.Module,
    signature: Signature,
    tensors: list[torch.Tensor],
    options: BuildOptions,
    device: torch.device,
    store: Store | None = None,
    guard: Choice = "on",
) -> Inference | Eager:
    """Capture and check the schedule of a call in evaluation mode: from the store, or else by a search for the fastest,
    which the store then keeps.

    Raises UsageError for several replays in flight if the module writes into its state, CannotRecord, CheckFailed
    if no candidate agrees with eager, EngineError, OutOfMemory; the module is then as it was.
    """
    names = [slot.name for slot in signature.tensors]
    with eval_mode(module), restoring_state(module, device), torch.inference_mode(False):
        call = flat(module, signature)
        example = {name: t.detach().clone() for name, t in zip(names, tensors, strict=True)}
        with refusing_copies(module, signature, tensors), changed_by_calls(module, training=False) as changed:
            observed = observe_calls(call, example, device)
        structure = Structure.of(observed.result)
        try:
            any_order = order_is_free(module, signature, example)
            observed.put_back()
            recording = record_source(call, Source(kernels="eager", layout="given"), _copies(example), device)
            program, layouts = recording.program, Layouts.of(signature, tensors, recording)
            observed.put_back()
            _refuse_writes_in_flight(program, options)
            parts = parts_of(program, options, device)
            parts |= {"model.source": f"module:{type(module).__module__}.{type(module).__qualname__}"}
            found = _found(call, example, parts, options, device, store, observed)
        finally:
            observed.put_back()
    built, hit = found.value, found.hit
    assert built is not None
    if built.schedule.runs == "eager":
        return Eager(signature=signature, module=module, schedule=built.schedule, hit=hit)
    return Inference(
        signature=signature,
        hit=hit,
        schedule=built.schedule,
        structure=structure,
        instances=built.instances,
        guard=Guard(module, training=False, but_for=frozenset(changed)) if guard == "on" else None,
        written=written_inputs(built.schedule.program),
        layouts=layouts,
        any_order=any_order,
        meeting=meeting_state(call, built.schedule.program),
        device=device,
    )


def _refuse_writes_in_flight(program: Program, options: BuildOptions) -> None:
    """Replays at the same time would write over what the others still read."""
    written = names_written(program)
    if written and options.in_flight != 1:
        raise UsageError(
            f"in_flight: found {options.in_flight}; expected 1, because the module writes into its own {written[0]!r}"
        )


def _found(
    call: nn.Module,
    example: dict[str, torch.Tensor],
    parts: dict[str, str],
    options: BuildOptions,
    device: torch.device,
    store: Store | None,
    observed: Observed,
) -> Obtained[Built | Restored]:
    """What is stored, or else the result of a search, which the store keeps.

    Raises CheckFailed if nothing agrees with eager.
    """
    key = schedule_key(parts)

    def build() -> BuildResult[Built | Restored]:
        built = build_best(call, example, key, options, device, keep_integers=True, observed=observed)
        return build_result(built, parts, built)

    if store is None:
        built = build()
        if built.failure is not None:
            built.close()
            raise CheckFailed(built.failure)
        return Obtained(hit=Hit.MISS, value=built.value)
    found = obtain(key, lambda: load(call, key, example, device, store, observed), build, store=store)
    if found.fallback is not None:
        raise CheckFailed(found.fallback)
    return found


def parts_of(program: Program, options: BuildOptions, device: torch.device) -> dict[str, str]:
    """Everything that the schedule of a recorded model depends on: what was recorded names the model exactly."""
    return {
        **devices.facts(device),
        "program": sha256(repr(program.bare()).encode()).hexdigest(),
        "format": str(FORMAT_VERSION),
        "mode": "inference",
        "schedule.purpose": options.purpose,
        "input": ", ".join(f"{p.name}:{p.view.dtype}{list(p.view.shape)}" for p in program.inputs),
        **option_parts(options),
        "schedule.in_flight": str(options.in_flight),
        "schedule.layout": options.layout,
    }


def _copies(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}
