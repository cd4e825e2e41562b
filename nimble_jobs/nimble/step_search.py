"""The fastest schedules for a training step: kernels as for inference, streams for each pass on its own."""

from __future__ import annotations

import secrets
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from nimble_jobs import graph
from nimble_jobs.engine import measure, verify
from nimble_jobs.engine.capture import Instance
from nimble_jobs.engine.inductor import compile_module, stop_compilers
from nimble_jobs.engine.record import Recording
from nimble_jobs.engine.step import GENERATOR, Step, record_step
from nimble_jobs.errors import CannotRecord, CheckFailed, EngineError, OutOfMemory
from nimble_jobs.nimble.pair import Forward, Pair, Subject, capture_backward, check
from nimble_jobs.planner.keys.options import BuildOptions
from nimble_jobs.planner.search.candidate import left_out
from nimble_jobs.planner.search.half import Half, with_streams
from nimble_jobs.planner.search.plans import durations_us
from nimble_jobs.planner.sources.source import Kernels, Source
from nimble_jobs.planner.step.compare import Tensors
from nimble_jobs.schedule import Candidate, Plan


@dataclass(frozen=True, kw_only=True)
class FoundStep:
    """A way to run the step that agrees with eager."""

    kernels: Kernels
    step: Step
    forward: Half
    backward: Half
    error: float
    candidate: Candidate

    @property
    def replay_us(self) -> float:
        return self.forward.replay_us + self.backward.replay_us


class StepSearch:
    """Tries, checks and measures. `candidates` holds what was tried."""

    def __init__(
        self,
        module: nn.Module,
        subject: Subject,
        options: BuildOptions,
        *,
        tolerance: float,
        below: int,
        changing: Tensors,
    ) -> None:
        """`changing`: tensors of the module that steps in eager change."""
        self._module = module
        self._subject = subject
        self._options = options
        self.tolerance = tolerance
        self._below = below
        self._changing = changing
        self._integers = {n: t for n, t in subject.inputs.items() if not (t.is_floating_point() or t.is_complex())}
        first = next(iter(subject.inputs.values()))
        self._batch = first.shape[0] if first.dim() else 1
        self.candidates: list[Candidate] = []

    def run(self) -> FoundStep:
        """The fastest. Raises CannotRecord, EngineError or CheckFailed where not even eager kernels can be used."""
        deadline = time.monotonic() + self._options.budget_s
        best = self._try("eager", must=True)
        assert best is not None
        further: list[Kernels] = []
        if self._subject.device.type == "cuda" and self._options.fuse != "off":
            further = ["inductor"] if self._options.fuse == "auto" else ["inductor", "max-autotune"]
        for kernels in further:
            if time.monotonic() > deadline:
                self._left_out(_name(kernels), f"not tried: the budget of {self._options.budget_s:.0f} s was used up")
                continue
            found = self._try(kernels)
            if found is not None and found.replay_us < best.replay_us:
                best = found
        if further:
            stop_compilers()
        return best

    def check(self, pair: Pair) -> float:
        """Raises CheckFailed where a pair disagrees with eager."""
        return check(
            pair,
            self._subject,
            tolerance=self.tolerance,
            seed=secrets.randbits(31),
            below=self._below,
            integers=self._integers,
            changing=self._changing,
        )

    def _try(self, kernels: Kernels, *, must: bool = False) -> FoundStep | None:
        try:
            return self._found(kernels)
        except OutOfMemory:
            if must:
                raise
            self._left_out(_name(kernels), "not built: not enough memory on the device")
        except CheckFailed as e:
            if must:
                raise
            self._left_out(_name(kernels), str(e), error=e.error)
        except EngineError as e:
            if must:
                raise
            self._left_out(_name(kernels), f"not built: {e}")
        return None

    def _found(self, kernels: Kernels) -> FoundStep:
        subject, device = self._subject, self._subject.device
        step = self._record(kernels)
        with ExitStack() as opened:
            plan, _ = graph.single_stream(step.forward.program)
            generator = torch.zeros(1, dtype=torch.uint8, device=device)
            times = durations_us(
                step.forward, plan, {**subject.state, GENERATOR: generator}, subject.device, self._below, self._integers
            )
            single, facts = graph.single_stream(step.forward.program, durations_us=times)
            forward = Forward(step, single, subject)
            opened.callback(forward.instance.close)
            fresh = verify.random_inputs(step.forward.program.inputs, device, 0, self._below, self._integers)
            for name, value in fresh.items():
                forward.instance.inputs[name].copy_(value)
            forward.replay()
            first = Half(
                plan=single,
                facts=facts,
                durations_us=times,
                replay_us=measure.time_us(forward.replay, device),
            )
            plan, _ = graph.single_stream(step.backward.program)
            times = durations_us(
                step.backward, plan, {**subject.state, **forward.saved}, subject.device, self._below, self._integers
            )
            single, facts = graph.single_stream(step.backward.program, durations_us=times)
            backward = capture_backward(step, single, forward, subject)
            opened.callback(backward.close)
            second = Half(
                plan=single,
                facts=facts,
                durations_us=times,
                replay_us=measure.time_us(backward.replay, device),
            )
            one = self._checked(kernels, step, first, second)
            fastest_forward = self._faster(step.forward, first, lambda plan: Forward(step, plan, subject).instance)
            fastest_backward = self._faster(
                step.backward, second, lambda plan: capture_backward(step, plan, forward, subject)
            )
        if fastest_forward is first and fastest_backward is second:
            return one
        try:
            return self._checked(kernels, step, fastest_forward, fastest_backward)
        except CheckFailed as e:
            self._left_out(f"{_name(kernels)}, several streams", str(e), error=e.error)
            return one

    def _faster(self, recording: Recording, single: Half, capture: Callable[[Plan], Instance]) -> Half:
        """The plan of one pass that measures fastest."""
        return with_streams(recording, single, capture, self._options, self._subject.device)[0]

    def _checked(self, kernels: Kernels, step: Step, forward: Half, backward: Half) -> FoundStep:
        pair = Pair(step, forward.plan, backward.plan, self._subject)
        try:
            error = self.check(pair)
            nbytes = pair.forward.instance.bytes + pair.backward.bytes
        finally:
            pair.close()
        replay_us = forward.replay_us + backward.replay_us
        candidate = Candidate(
            name=f"{_name(kernels)}, {forward.plan.streams} and {backward.plan.streams} streams",
            replay_us=replay_us,
            records_per_s=self._batch / replay_us * 1e6,
            peak_bytes=nbytes,
            error=error,
            chosen=False,
            reason="",
        )
        self.candidates.append(candidate)
        return FoundStep(
            kernels=kernels, step=step, forward=forward, backward=backward, error=error, candidate=candidate
        )

    def _record(self, kernels: Kernels) -> Step:
        if kernels == "eager":
            return self._recorded(self._subject.call)
        call = compile_module(self._module, max_autotune=kernels == "max-autotune", eager_random=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice from compilers to their own users
            try:
                return self._recorded(call, compiled=True)
            except (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError) as e:
                raise CannotRecord(f"Inductor cannot compile the backward pass: {str(e).splitlines()[0]}") from e

    def _recorded(self, call: Callable[..., object], *, compiled: bool = False) -> Step:
        subject = self._subject
        inputs = subject.with_grad(subject.inputs)
        return record_step(
            call,
            inputs,
            subject.leaves(inputs),
            subject.state,
            subject.device,
            module=self._module,
            compiled=compiled,
            accumulate=subject.hides_gradients,
        )

    def _left_out(self, name: str, reason: str, *, error: float | None = None) -> None:
        self.candidates.append(left_out(name, reason, error=error))


def _name(kernels: Kernels) -> str:
    return Source(kernels=kernels, layout="given").name
