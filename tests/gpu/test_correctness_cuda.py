"""The benchmark's networks on a real GPU, on several streams: against eager, between replays, and side by side.

Small images keep it quick; every operator, branch and buffer is as in the full size.
"""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from nimble_jobs import Nimble
from nimble_jobs.bench import zoo
from nimble_jobs.engine.capture import Instance, capture
from nimble_jobs.engine.launch import flight_streams
from nimble_jobs.engine.record import Recording, state_of
from nimble_jobs.engine.step import record_step
from nimble_jobs.engine.verify import TOLERANCE, check, random_inputs, run_once
from nimble_jobs.graph import make_plan
from nimble_jobs.nimble import pair as pairs
from nimble_jobs.planner.sources.source import Kernels, Source, record_source
from nimble_jobs.schedule import GraphFacts, Plan

DEVICE = torch.device("cuda", 0)
SIDE = 64  # of images, in pixels
SIDES = {"inception_v3": 107, "efficientnet_b5": 128}  # its last layers need more; its outputs are all alike with less
TOKENS = 32
DTYPES = {"fp16": torch.float16, "fp32": torch.float32}
STREAMS = {"fp16": 4, "fp32": None}  # bound on them: both kinds of plans
COMPILED = ("googlenet", "mobilenet_v2")
# Inductor rounds intermediates of half precision elsewhere than eager does, layer after layer.
COMPILED_TOLERANCE = 2e-2
INPUTS = 20
REPLAYS = 500

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # Inductor imports what it should not


@functools.cache
def on_cpu(name: str) -> nn.Module:
    return zoo.create(name)


def module_of(name: str, dtype: torch.dtype) -> nn.Module:
    return copy.deepcopy(on_cpu(name)).to(DEVICE, dtype)


def example(name: str, dtype: torch.dtype, batch: int = 1) -> torch.Tensor:
    below = zoo.ZOO[name].below
    if below is not None:
        return torch.randint(below, (batch, TOKENS), device=DEVICE)
    side = SIDES.get(name, SIDE)
    return torch.randn(batch, 3, side, side, device=DEVICE, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A network, captured so many times, with a plan of several streams wherever it has branches."""

    name: str
    module: nn.Module
    recording: Recording
    plan: Plan
    facts: GraphFacts
    bounded: bool  # so that the plan may have fewer streams than the graph would keep busy
    instances: list[Instance]
    tolerance: float

    @classmethod
    def of(cls, name: str, dtype: str, kernels: Kernels = "eager", count: int = 1) -> Ready:
        module = module_of(name, DTYPES[dtype])
        source = Source(kernels=kernels, layout="given")
        recording = record_source(module, source, {"x": example(name, DTYPES[dtype])}, DEVICE)
        plan, facts = make_plan(recording.program, max_streams=STREAMS[dtype])
        made = [
            capture(
                recording.program,
                plan,
                state=state_of(module),
                constants=recording.constants,
                kernels=recording.kernels,
                device=DEVICE,
            )
            for _ in range(count)
        ]
        return cls(
            name=name,
            module=module,
            recording=recording,
            plan=plan,
            facts=facts,
            bounded=STREAMS[dtype] is not None,
            instances=made,
            tolerance=TOLERANCE[dtype] if kernels == "eager" else COMPILED_TOLERANCE,
        )

    @property
    def below(self) -> int:
        return zoo.ZOO[self.name].below or 2

    def inputs(self, seed: int) -> dict[str, torch.Tensor]:
        return random_inputs(self.recording.program.inputs, DEVICE, seed, self.below)

    def close(self) -> None:
        for instance in self.instances:
            instance.close()


def raw(outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """All bytes of the outputs, on the device."""
    return torch.cat([t.flatten().view(torch.uint8) for t in outputs.values()])


def digest(of: torch.Tensor) -> str:
    return hashlib.sha256(of.cpu().numpy().tobytes()).hexdigest()


CASES = [(name, dtype, "eager") for name in zoo.ZOO for dtype in DTYPES]
CASES += [(name, "fp16", "inductor") for name in COMPILED]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def ready(request: pytest.FixtureRequest) -> Iterator[Ready]:
    made = Ready.of(*request.param)
    yield made
    made.close()


def test_twenty_fresh_inputs_agree_with_eager(ready: Ready) -> None:
    """Every network, on as many streams as its branches allow or on four, over poisoned outputs."""
    assert ready.plan.streams > 1 or ready.facts.width == 1 or ready.bounded
    for seed in range(INPUTS // 2):  # a check takes two
        check(
            ready.instances[0],
            ready.module,
            ready.recording.program.inputs,
            DEVICE,
            tolerance=ready.tolerance,
            seed=100 * seed,
            below=ready.below,
        )


def test_five_hundred_replays_give_the_same_bytes(ready: Ready) -> None:
    """One input, replayed over poisoned outputs; the first and the last result have one SHA-256."""
    (instance,) = ready.instances
    inputs = ready.inputs(7)
    first = last = raw(run_once(instance, inputs))
    for _ in range(REPLAYS - 1):
        last = raw(run_once(instance, inputs))
        assert torch.equal(last, first)
    assert digest(last) == digest(first)


@pytest.mark.parametrize("names", [("googlenet", "nasnet_a_mobile"), ("bert_base", "inception_v3")], ids="-".join)
def test_two_models_interleaved_a_thousand_times(names: tuple[str, str]) -> None:
    """Replays of two networks in turn, without a pause between them, give each its own bytes."""
    both = [Ready.of(name, "fp16") for name in names]
    inputs = [one.inputs(3) for one in both]
    first = [raw(run_once(one.instances[0], given)) for one, given in zip(both, inputs, strict=True)]
    different = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for turn in range(1_000):
        found = raw(run_once(both[turn % 2].instances[0], inputs[turn % 2]))
        different += (found != first[turn % 2]).any()
    assert int(different) == 0
    for one in both:
        one.close()


@pytest.mark.parametrize("name", ["bert_base", "nasnet_a_mobile"])
def test_replays_that_overlap_do_not_disturb_each_other(name: str) -> None:
    """Four instances of one network, each replayed on a stream of its own with its own input, all at once."""
    one = Ready.of(name, "fp16", count=4)
    lanes = flight_streams(DEVICE, len(one.instances))
    alone, different = [], []
    for seed, instance in enumerate(one.instances):
        alone.append(raw(run_once(instance, one.inputs(seed))))
        different.append(torch.zeros((), dtype=torch.int64, device=DEVICE))
    torch.cuda.synchronize()
    for _ in range(250):
        for instance, lane, expected, count in zip(one.instances, lanes, alone, different, strict=True):
            with torch.cuda.stream(lane):
                instance.replay()
                count += (raw(instance.outputs) != expected).any()
    torch.cuda.synchronize()
    assert [int(count) for count in different] == [0] * len(one.instances)
    one.close()


@pytest.fixture
def _repeatable_kernels() -> Iterator[None]:
    """Deep networks in training mode multiply rounding errors: eager must give the same gradients twice."""
    backend = torch.backends.cudnn
    before = backend.allow_tf32, backend.deterministic
    backend.allow_tf32, backend.deterministic = False, True
    yield
    backend.allow_tf32, backend.deterministic = before


@pytest.mark.usefixtures("_repeatable_kernels")
def test_dropout_masks_differ_between_replays() -> None:
    """In training mode twenty calls with one input give twenty outputs: nothing else in it is random."""
    module = module_of("mobilenet_v2", torch.float32).train()
    assert any(isinstance(part, nn.Dropout) and part.p > 0 for part in module.modules())
    x = example("mobilenet_v2", torch.float32, batch=8)
    with Nimble(module) as nimble:
        nimble.prepare(x, training=True, fuse="off", streams=2)
        assert nimble.schedule is not None
        assert len({digest(raw({"y": nimble(x).detach()})) for _ in range(20)}) == 20


@pytest.mark.usefixtures("_repeatable_kernels")
@pytest.mark.parametrize("name", ["resnet50", "efficientnet_b0", "nasnet_a_mobile", "darts", "bert_base"])
def test_training_gradients_agree_with_eager(name: str) -> None:
    """Outputs, every gradient and every running statistic of a step, on four streams in both passes."""
    module = module_of(name, torch.float32).train()
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if hasattr(part, "dropout_prob"):
            part.dropout_prob = 0.0
    x = example(name, torch.float32, batch=8)
    integers: dict[str, Any] = {} if x.is_floating_point() else {"x": x}
    subject = pairs.Subject(
        call=module,
        inputs={"x": x},
        parameters=dict(module.named_parameters()),
        input_leaves=(),
        state=state_of(module),
        device=DEVICE,
    )
    step = record_step(module, {"x": x}, subject.parameters, subject.state, DEVICE, module=module)
    forward, _ = make_plan(step.forward.program, max_streams=4)
    backward, _ = make_plan(step.backward.program, max_streams=4)
    assert backward.streams > 1
    pair = pairs.Pair(step, forward, backward, subject)
    for seed in (1, 11):
        pairs.check(pair, subject, tolerance=TOLERANCE["fp32"], seed=seed, below=2, integers=integers, changing={})
    pair.close()
