"""Whole training steps on a real GPU: streams, Inductor's kernels, loss scaling and masks, against eager."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

from nimble_jobs.job import Hit
from nimble_jobs.planner.keys.options import BuildOptions
from nimble_jobs.planner.lookup.obtain import by_spec
from nimble_jobs.planner.sources.source import Source
from nimble_jobs.planner.step import live as step_live
from nimble_jobs.planner.step.build import EagerStep, OptimizerRecipe, StepRequest, TrainingStep, prepare_step
from nimble_jobs.planner.step.prepare import PreparedStep, prepare_stored_step
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve

STEPS = 50
SGD = OptimizerRecipe(name="sgd", momentum=0.9, weight_decay=1e-4)

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # Inductor imports what is deprecated


@pytest.fixture(autouse=True)
def _exact_matmuls() -> Iterator[None]:
    """Gradients are compared closely: without TF32."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


class Branches(nn.Module):
    """Four branches a block, so that streams have something to do."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(4)
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = torch.cat([branch(x) for branch in self.branches], 1)
        return self.head(self.dropout(x.mean((2, 3))))


def branches(device: torch.device, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return Branches(dropout).to(device)


def batches(device: torch.device, count: int = STEPS, size: int = 16, side: int = 16) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(count):
        x = torch.randn(size, 3, side, side, generator=generator)
        yield x.to(device), torch.randint(0, 10, (size,), generator=generator).to(device)


def request_for(
    module: nn.Module, device: torch.device, optimizer: OptimizerRecipe = SGD, side: int = 16, **more: Any
) -> StepRequest:
    x, y = next(batches(device, 1, side=side))
    return StepRequest(
        module=module.train(),
        x=x,
        y=y,
        loss=nn.functional.cross_entropy,
        loss_name="cross_entropy",
        optimizer=optimizer,
        **more,
    )


def options(kind: str) -> BuildOptions:
    return {
        "one stream": BuildOptions(streams=1, fuse="off"),
        "streams": BuildOptions(fuse="off"),
        "inductor": BuildOptions(fuse="auto"),
    }[kind]


def run(step: TrainingStep, device: torch.device, *, accumulate: int = 1, count: int = STEPS, side: int = 16) -> Any:
    losses = []
    for number, (x, y) in enumerate(batches(device, count, side=side)):
        step.run(x, y, 0.05 / (1 + number / 10), (number + 1) % accumulate == 0)
        losses.append(step.loss.clone())
    return torch.stack(losses)


def mean_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().mean() / expected.abs().mean())


def tried(step: TrainingStep) -> str:
    assert step.schedule is not None, step.fallback
    return "\n".join(f"{c.name}: {c.replay_us} {c.error} {c.reason}" for c in step.schedule.candidates)


RECIPES = {
    "sgd": (SGD, {}),
    "nesterov, clipped": (OptimizerRecipe(name="sgd", momentum=0.9, nesterov=True), {"clip_norm": 1.0}),
    "adamw, accumulated": (OptimizerRecipe(name="adamw", weight_decay=0.05), {"accumulate": 2}),
    "adam, bf16": (OptimizerRecipe(name="adam"), {"precision": "bf16"}),
    "sgd, fp16": (SGD, {"precision": "fp16"}),
}


@pytest.mark.parametrize("kind", ["one stream", "streams", "inductor"])
@pytest.mark.parametrize("name", RECIPES)
def test_fifty_steps_follow_eager(name: str, kind: str, device: torch.device) -> None:
    """Losses differ from eager's by less than 2 % on average (10 % in low precision); nothing falls back."""
    recipe, more = RECIPES[name]
    module, twin = branches(device), branches(device)
    before = copy.deepcopy(module.state_dict())
    step = prepare_step(request_for(module, device, recipe, options=options(kind), **more), device=device)
    assert step.fallback is None
    for key, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[key]), key
    accumulate = more.get("accumulate", 1)
    found = run(step, device, accumulate=accumulate)
    expected = run(EagerStep(request_for(twin, device, recipe, **more), device), device, accumulate=accumulate)
    assert float(expected[-10:].mean()) < float(expected[:10].mean()) + 1  # it trains, and does not run away
    assert mean_difference(found, expected) < (0.1 if "precision" in more else 0.02), tried(step)
    assert int(module.stem[1].num_batches_tracked) == STEPS
    step.close()


@pytest.mark.parametrize("kind", ["streams", "inductor"])
def test_masks_are_those_of_eager_and_new_each_time(kind: str, device: torch.device) -> None:
    """With equal random states replay and eager draw the same masks; the next replay draws others."""
    module, twin = branches(device, 0.5), branches(device, 0.5)
    step = prepare_step(request_for(module, device, options=options(kind)), device=device)
    eager = EagerStep(request_for(twin, device), device)
    losses = []
    for stepper in (step, eager):
        torch.cuda.manual_seed(7)
        losses.append(run(stepper, device, count=5))
    assert mean_difference(losses[0], losses[1]) < 0.02, tried(step)
    x, y = next(batches(device, 1))
    varied = set()
    for _ in range(6):
        step.run(x, y, 0.0)
        varied.add(float(step.loss))
    assert len(varied) > 3


@pytest.mark.parametrize("kind", ["one stream", "streams", "inductor"])
def test_every_candidate_was_built_and_passed(kind: str, device: torch.device) -> None:
    """No candidate is left out by an error: what is not chosen was slower, or had no streams to gain."""
    step = prepare_step(request_for(branches(device), device, options=options(kind)), device=device)
    assert step.schedule is not None, step.fallback
    for candidate in step.schedule.candidates:
        assert "not built" not in candidate.reason, tried(step)
        assert "differs from eager" not in candidate.reason, tried(step)
    names = [c.name for c in step.schedule.candidates]
    assert "eager kernels, 1 stream" in names
    assert any(n.startswith("inductor kernels") for n in names) == (kind == "inductor")


@pytest.mark.parametrize("kind", ["one stream", "inductor"])
def test_an_overflow_is_skipped_inside_the_graph(kind: str, device: torch.device) -> None:
    """In fp16 an input that is not finite leaves weights and slots as they are, halves the scale, and passes."""
    module = branches(device)
    step = prepare_step(request_for(module, device, options=options(kind), precision="fp16"), device=device)
    assert step.fallback is None
    run(step, device, count=5)
    before = {n: p.clone() for n, p in module.named_parameters()}
    state = {n: t.clone() for n, t in step.state_dict().items()}
    x, y = next(batches(device, 1))
    step.run(torch.full_like(x, float("inf")), y, 0.1)
    assert bool(step.found_inf)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name]), name
    for name, tensor in step.state_dict().items():
        if name == "scaler.scale":
            assert float(tensor) == float(state[name]) / 2
        elif name != "scaler.growth_tracker":
            assert torch.equal(tensor, state[name]), name


def test_what_goes_on_from_a_state_is_what_was_left(device: torch.device) -> None:
    """Weights and state loaded back give the next losses again, bit for bit where cuDNN is told to be deterministic."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        module = branches(device)
        step = prepare_step(request_for(module, device, OptimizerRecipe(name="adamw")), device=device)
        assert step.fallback is None
        run(step, device, count=7)
        weights = copy.deepcopy(module.state_dict())
        state = {n: t.clone() for n, t in step.state_dict().items()}
        first = run(step, device, count=10)
        module.load_state_dict(weights)
        step.load_state_dict(state)
        assert torch.equal(run(step, device, count=10), first)
    finally:
        torch.backends.cudnn.deterministic = before


def test_a_short_batch_runs_in_eager_amid_replays(device: torch.device) -> None:
    """Three records instead of sixteen train the same weights; the replays go on with them."""
    module, twin = branches(device), branches(device)
    step = prepare_step(request_for(module, device), device=device)
    eager = EagerStep(request_for(twin, device), device)
    losses = []
    for stepper in (step, eager):
        found = [run(stepper, device, count=5)]
        x, y = next(batches(device, 1))
        stepper.run(x[:3], y[:3], 0.05)
        found += [stepper.loss.clone()[None], run(stepper, device, count=5)]
        losses.append(torch.cat(found))
    assert mean_difference(losses[0], losses[1]) < 0.02


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, g: torch.Tensor) -> torch.Tensor:
        if torch._C._len_torch_dispatch_stack():
            raise KeyError("mode")
        return g


class OnlyInEager(Branches):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return FailsInBackward.apply(super().forward(x))


@pytest.mark.parametrize("kind", ["streams", "inductor"])
def test_what_fails_only_while_it_is_recorded_trains_as_in_eager(kind: str, device: torch.device) -> None:
    """With the same bits: masks, statistics and the optimizer's state are those of a step that nobody recorded."""
    results = []
    with torch.backends.cudnn.flags(deterministic=True, benchmark=False, allow_tf32=False):
        for made in (EagerStep, prepare_step):
            torch.manual_seed(0)
            module = OnlyInEager(0.5).to(device)
            step = made(request_for(module, device, options=options(kind)), device=device)
            torch.manual_seed(1)
            losses = run(step, device, count=8)
            results.append((step, {"losses": losses, **module.state_dict(), **step.state_dict()}))
    (_, expected), (step, found) = results
    assert (step.schedule, step.fallback) == (None, "the model fails while it is recorded: KeyError: 'mode'")
    assert [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])] == []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_attention_with_dropout_is_recorded(precision: Any, device: torch.device) -> None:
    """The seeds that attention's backward needs come from its forward in the same replay."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.3, batch_first=True)

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.layer, self.head = nn.Embedding(100, 64), layer, nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.layer(self.words(x)).mean(1))

    module = Words().to(device)
    twin = copy.deepcopy(module)
    x = torch.randint(0, 100, (8, 32), device=device)
    y = torch.randint(0, 10, (8,), device=device)
    requests = [
        StepRequest(
            module=m.train(),
            x=x,
            y=y,
            loss=nn.functional.cross_entropy,
            loss_name="cross_entropy",
            optimizer=SGD,
            precision=precision,
            options=BuildOptions(fuse="auto"),
        )
        for m in (module, twin)
    ]
    step = prepare_step(requests[0], device=device)
    assert step.fallback is None
    losses = []
    for stepper in (step, EagerStep(requests[1], device)):
        torch.cuda.manual_seed(3)
        found = []
        for _ in range(10):
            stepper.run(x, y, 0.01)
            found.append(stepper.loss.clone())
        losses.append(torch.stack(found))
    assert mean_difference(losses[0], losses[1]) < (0.02 if precision == "fp32" else 0.1), tried(step)
    assert len({float(loss) for loss in losses[0]}) == 10


def test_a_large_network_on_streams_with_inductor(device: torch.device) -> None:
    """MobileNetV2 at 32 pixels: chosen schedule no slower than eager kernels on one stream. Its losses are no further
    from eager's than those of eager itself, with weights moved by a rounding error: the two grow apart soon."""
    torch.manual_seed(0)
    module = torchvision.models.mobilenet_v2(num_classes=10, dropout=0.0).to(device)
    twin, moved = copy.deepcopy(module), copy.deepcopy(module)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.mul_(1 + 1e-7 * torch.randn_like(parameter))
    step = prepare_step(request_for(module, device, side=32, tolerance=1e-2), device=device)
    assert step.schedule is not None, step.fallback
    one = next(c for c in step.schedule.candidates if c.name == "eager kernels, 1 stream")
    chosen = next(c for c in step.schedule.candidates if c.chosen)
    assert chosen.replay_us is not None
    assert one.replay_us is not None
    assert chosen.replay_us <= one.replay_us
    found = run(step, device, count=20, side=32)
    expected, near = (
        run(EagerStep(request_for(m, device, side=32), device), device, count=20, side=32) for m in (twin, moved)
    )
    assert mean_difference(found, expected) < 0.02 + 2 * mean_difference(near, expected), tried(step)


def stored(request: StepRequest, store: Store, device: torch.device, *, on_miss: str) -> PreparedStep:
    return prepare_stored_step(
        request,
        {"case": "branches"},
        device=device,
        store=store,
        on_miss=by_spec(on_miss),
        check_code=lambda: None,
    )


def test_a_stored_step_needs_no_compiler(device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both programs of an accumulated step come back with the machine code of Inductor's kernels, and give the losses
    of the step that was built, bit for bit."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    only = Source(kernels="inductor", layout="given")
    more: dict[str, Any] = {"accumulate": 2, "options": options("inductor"), "only": only}
    with open_store(resolve(str(tmp_path / "home"))) as store:
        built = stored(request_for(branches(device), device, **more), store, device, on_miss="build")
        assert (built.hit, built.step.fallback) == (Hit.MISS, None)
        expected = run(built.step, device, accumulate=2, count=20)
        built.step.close()
        for schedule in built.step.schedules.values():
            assert schedule.kernels == "inductor"
            assert schedule.compiled, "the machine code is stored"
        monkeypatch.setattr(step_live, "objective_with", None)
        monkeypatch.setattr(step_live, "record_step", None)
        found = stored(request_for(branches(device), device, **more), store, device, on_miss="fail")
        assert found.hit is Hit.STORED
        assert found.step.schedules == built.step.schedules
        assert torch.equal(run(found.step, device, accumulate=2, count=20), expected)
        found.step.close()
