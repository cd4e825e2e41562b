"""`Nimble` on a real GPU: inference and training against eager, side by side, and without traces."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

from nimble_jobs import Nimble
from nimble_jobs.errors import CannotRecord, EngineError, UsageError
from nimble_jobs.planner.step.compare import compare_gradient, disturb, noise_of, rms


@pytest.fixture(autouse=True)
def _exact_matmuls() -> Any:
    """Gradients are compared closely: without TF32."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def network(name: str, device: torch.device, dtype: torch.dtype = torch.float32, **args: Any) -> nn.Module:
    torch.manual_seed(0)
    return torchvision.models.get_model(name, weights=None, num_classes=10, **args).to(device, dtype)


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative norm of the difference."""
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


class Parts(nn.Module):
    """Named and nested arguments and outputs, an embedding and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, ids: torch.Tensor, *, mask: torch.Tensor, extra: dict[str, Any]) -> dict[str, Any]:
        y = self.block(self.words(ids) * extra["gain"] + extra["shift"], src_key_padding_mask=mask)
        return {"tokens": y, "pooled": (y.mean(1), ids)}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # Inductor imports what torch has deprecated
@pytest.mark.parametrize("fuse", ["off", "auto"])
def test_structures_and_integers(fuse: Any, device: torch.device) -> None:
    """Nested tensors, constants and integer inputs; outputs in the model's own structure."""
    module = Parts().to(device).eval()

    def arguments() -> tuple[tuple[torch.Tensor], dict[str, Any]]:
        mask = torch.zeros(2, 5, dtype=torch.bool, device=device)
        mask[:, 4] = True
        extra = {"gain": 2.0, "shift": torch.randn(2, 5, 16, device=device)}
        return (torch.randint(0, 100, (2, 5), device=device),), {"mask": mask, "extra": extra}

    nimble = Nimble(module)
    nimble.prepare(arguments(), fuse=fuse)
    for _ in range(20):
        args, kwargs = arguments()
        found = nimble(*args, **kwargs)
        with torch.no_grad():
            expected = module(*args, **kwargs)
        assert apart(found["tokens"], expected["tokens"]) < 1e-3
        assert apart(found["pooled"][0], expected["pooled"][0]) < 1e-3
        assert torch.equal(found["pooled"][1], args[0])
    with pytest.raises(UsageError, match=r"^args\.0: found int64\[3, 5\] on cuda:0; expected int64\[2, 5\] on cuda:0$"):
        nimble(torch.zeros(3, 5, dtype=torch.int64, device=device), **arguments()[1])
    with pytest.raises(UsageError, match=r"^args\.0: found int64\[2, 5\] on cpu; expected"):
        nimble(arguments()[0][0].cpu(), **arguments()[1])


def test_five_hundred_calls_hash_the_same_and_two_models_interleave(device: torch.device) -> None:
    """A thousand calls of two models in turn give one result each, whoever came before."""
    pairs = []
    for name in ("resnet18", "mobilenet_v2"):
        module = network(name, device, torch.float16).eval()
        nimble = Nimble(module)
        x = torch.randn(2, 3, 96, 96, device=device, dtype=torch.float16)
        nimble.prepare(x)
        with torch.no_grad():
            assert apart(nimble(x), module(x)) < 1e-2
        pairs.append((nimble, x))
    seen: list[set[str]] = [set(), set()]
    for turn in range(1000):
        nimble, x = pairs[turn % 2]
        seen[turn % 2].add(hashlib.sha256(nimble(x).cpu().numpy().tobytes()).hexdigest())
    assert [len(s) for s in seen] == [1, 1]


def test_weights_changed_in_place_are_seen_in_any_layout(device: torch.device) -> None:
    """Whatever layout the schedule chose, `load_state_dict` reaches it; `release` lays the weights out as before."""
    module, other = network("resnet18", device).eval(), network("resnet18", device).eval()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.1)
    strides = [p.stride() for p in module.parameters()]
    nimble = Nimble(module)
    x = torch.randn(1, 3, 64, 64, device=device)
    nimble.prepare(x)
    nimble.prepare(torch.randn(4, 3, 64, 64, device=device))
    module.load_state_dict(other.state_dict())
    with torch.no_grad():
        assert apart(nimble(x), other(x)) < 1e-3
        many = torch.randn(4, 3, 64, 64, device=device)
        assert apart(nimble(many), other(many)) < 1e-3
        nimble.release()
        assert [p.stride() for p in module.parameters()] == strides
        assert apart(module(x), other(x)) < 1e-3


class Scaled(nn.Module):
    """A network with a buffer of four dimensions."""

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("scale", torch.rand(1, 3, 64, 64, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x * self.scale)


def test_release_lays_buffers_out_as_they_were(device: torch.device) -> None:
    """Where a schedule chose a layout, a buffer has its own again."""
    module = Scaled(network("resnet18", device, torch.float16), device).half().eval()
    before = [t.stride() for t in module.state_dict().values()]
    nimble = Nimble(module)
    nimble.prepare(torch.randn(8, 3, 64, 64, device=device, dtype=torch.float16), fuse="off")
    nimble.release()
    assert [t.stride() for t in module.state_dict().values()] == before


def test_calls_on_other_streams(device: torch.device) -> None:
    """Calls from several CUDA streams, with several replays in flight, do not overwrite each other."""
    module = network("resnet18", device).eval()
    nimble = Nimble(module)
    inputs = [torch.randn(1, 3, 64, 64, device=device) for _ in range(8)]
    nimble.prepare(inputs[0], in_flight=2)
    with torch.no_grad():
        expected = [module(x) for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(device) for _ in range(4)]
    for _ in range(20):
        found = []
        for i, x in enumerate(inputs):
            with torch.cuda.stream(streams[i % 4]):
                found.append(nimble(x))
        torch.cuda.synchronize()
        assert all(apart(a, b) < 1e-3 for a, b in zip(found, expected, strict=True))


class ReadsHost(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x))
        return y * float(y.detach().sum())


@pytest.mark.parametrize("training", [False, True])
def test_a_failed_preparation_leaves_no_trace(training: bool, device: torch.device) -> None:
    """Random states, buffers, gradients and hooks are as before; another model can be prepared."""
    module = ReadsHost().to(device)
    before = copy.deepcopy(module.state_dict())
    cpu, cuda = torch.get_rng_state(), torch.cuda.get_rng_state(device)
    with pytest.raises(CannotRecord, match="_local_scalar_dense"):
        Nimble(module).prepare(torch.ones(2, 3, 8, 8, device=device), training=training)
    assert torch.equal(torch.get_rng_state(), cpu)
    assert torch.equal(torch.cuda.get_rng_state(device), cuda)
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    linear = nn.Linear(4, 4).to(device)
    nimble = Nimble(linear)
    nimble.prepare(torch.ones(2, 4, device=device), training=training)
    nimble(torch.ones(2, 4, device=device))


def rounding_noise(module: nn.Module, x: torch.Tensor, target: torch.Tensor) -> dict[str, float]:
    """By parameter, the most that its gradient moves in eager where weights and input are moved by a last place."""
    runs = []
    for seed in range(5):
        moved, other = copy.deepcopy(module), x.clone()
        if seed:
            disturb([*moved.parameters(), other], torch.finfo(torch.float32).eps, seed)
        moved.zero_grad()
        nn.functional.cross_entropy(moved(other), target).backward()
        runs.append({n: p.grad for n, p in moved.named_parameters()})
    found = [noise_of(run, runs[0]) for run in runs[1:]]
    return {name: max(noise[name] for noise in found) for name in runs[0]}


@pytest.mark.parametrize(
    ("name", "fuse"),
    [
        ("resnet18", "off"),
        ("mobilenet_v2", "off"),
        ("googlenet", "off"),
        ("resnet18", "auto"),
        ("mobilenet_v2", "auto"),
    ],
)
def test_gradients_and_statistics_equal_eager(name: str, fuse: Any, device: torch.device) -> None:
    """Every parameter's gradient and every running statistic of a step, with streams over both passes.

    Inductor's kernels round in other places than eager's, which may move a value over the edge of a ReLU: they may
    differ by what such roundings do to eager's own gradients.
    """
    args: dict[str, Any] = {"aux_logits": False, "init_weights": False} if name == "googlenet" else {}
    module = network(name, device, **args)
    for m in module.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.0
    twin = copy.deepcopy(module)
    nimble = Nimble(module)
    nimble.prepare(torch.randn(8, 3, 64, 64, device=device), training=True, fuse=fuse)
    assert nimble.schedule is not None
    assert nimble.backward_schedule is not None
    for candidate in nimble.schedule.candidates:
        print(candidate.name, candidate.replay_us, candidate.error, candidate.reason)
    for _ in range(5):
        x = torch.randn(8, 3, 64, 64, device=device)
        target = torch.randint(0, 10, (8,), device=device)
        noise = {} if fuse == "off" else rounding_noise(twin, x, target)
        for call, of in ((nimble, module), (twin, twin)):
            of.zero_grad()
            nn.functional.cross_entropy(call(x), target).backward()
        floor = 1e-3 * max(rms(p.grad) for p in twin.parameters())
        for (label, p), q in zip(module.named_parameters(), twin.parameters(), strict=True):
            compare_gradient(label, p.grad, q.grad, 1e-2, floor, noise.get(label, 0.0))
        for (label, a), b in zip(module.named_buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5, msg=label)


def test_training_with_an_optimizer_follows_eager(device: torch.device) -> None:
    """Twenty steps of SGD with momentum and dropout, from the same seed, stay with eager's losses."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(16 * 225, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10),
    ).to(device)  # fmt: skip
    twin = copy.deepcopy(module)
    nimble = Nimble(module)
    nimble.prepare(torch.randn(16, 3, 32, 32, device=device), training=True, fuse="off")
    generator = torch.Generator(device=device).manual_seed(3)
    data = [torch.randn(16, 3, 32, 32, device=device, generator=generator) for _ in range(20)]
    target = torch.arange(16, device=device) % 10
    losses: list[list[float]] = []
    for call, of in ((nimble, module), (twin, twin)):
        optimizer = torch.optim.SGD(of.parameters(), lr=0.02, momentum=0.9)
        torch.manual_seed(11)
        losses.append([])
        for x in data:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(call(x), target)
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


@pytest.mark.parametrize("fuse", ["off", "auto"])
def test_each_replay_draws_a_new_mask_and_the_backward_uses_it(fuse: Any, device: torch.device) -> None:
    """With identity weights, the gradient shows the mask that the output shows; no two calls share one."""
    module = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Dropout(0.5)).to(device)
    with torch.no_grad():
        module[0].weight.copy_(torch.eye(256))
    nimble = Nimble(module)
    nimble.prepare(torch.ones(1, 256, device=device, requires_grad=True), training=True, fuse=fuse)
    masks = []
    for _ in range(20):
        x = torch.ones(1, 256, device=device, requires_grad=True)
        y = nimble(x)
        y.sum().backward()
        assert x.grad is not None
        assert torch.equal(y.detach(), x.grad)
        masks.append(tuple(y[0].tolist()))
    assert len(set(masks)) == 20


def test_two_models_in_training_interleaved(device: torch.device) -> None:
    """Forwards of two models come before the backward of both, a hundred times."""
    first, second = network("resnet18", device), network("mobilenet_v2", device)
    for m in second.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.0
    nimbles = []
    x = torch.randn(4, 3, 64, 64, device=device)
    for module in (first, second):
        nimbles.append(Nimble(module))
        nimbles[-1].prepare(x, training=True, fuse="off")
    seen = set()
    for _ in range(100):
        first.zero_grad(), second.zero_grad()
        (nimbles[0](x).square().sum() + nimbles[1](x).sum()).backward()
        seen.add(round(float(sum(p.grad.double().norm() for m in (first, second) for p in m.parameters())), 2))
    assert max(seen) - min(seen) <= 1e-3 * max(seen)


def test_a_backward_after_another_call_is_an_error(device: torch.device) -> None:
    """What an earlier call saved is gone; its gradients would be wrong."""
    nimble = Nimble(nn.Linear(8, 8).to(device))
    nimble.prepare(torch.randn(2, 8, device=device), training=True, fuse="off")
    early = nimble(torch.randn(2, 8, device=device))
    late = nimble(torch.randn(2, 8, device=device))
    with pytest.raises(EngineError, match="called again before this backward"):
        early.sum().backward()
    late.sum().backward()


@pytest.mark.parametrize("writes", [False, True])
def test_a_changed_module_is_noticed_beside_the_replay(writes: bool, device: torch.device) -> None:
    """The look comes after the launch, or before it where the replay writes statistics; outputs are withheld."""
    module = network("resnet18", device).train(writes)
    x = torch.randn(2, 3, 64, 64, device=device)
    nimble = Nimble(module)
    nimble.prepare(x, training=writes, fuse="off")
    nimble(x)
    before = module.bn1.num_batches_tracked.clone()
    module.layer1[0].bn1.eps = 0.5
    with pytest.raises(EngineError, match=r"'layer1\.0\.bn1\.eps' was 1e-05, and is 0\.5"):
        nimble(x)
    assert torch.equal(module.bn1.num_batches_tracked, before)


def test_eager_loses_to_replays_on_a_gpu(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With eager as a candidate the schedule is still what runs where launches take most of the time."""
    monkeypatch.setenv("NIMBLE_JOBS_EAGER", "candidate")
    module, x = network("resnet18", device).eval(), torch.randn(1, 3, 64, 64, device=device)
    nimble = Nimble(module)
    nimble.prepare(x, fuse="off")
    assert nimble.schedule is not None
    assert nimble.schedule.runs == "schedule"
    assert nimble.schedule.replay_us < nimble.schedule.eager_us
