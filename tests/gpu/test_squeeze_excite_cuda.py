"""Our kernels for squeeze-and-excitation against fp64, alone and in a whole schedule."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from nimble_jobs import graph
from nimble_jobs.engine.capture import capture
from nimble_jobs.engine.contents import state_of
from nimble_jobs.engine.difference import relative_norm
from nimble_jobs.engine.encode import dtype
from nimble_jobs.engine.verify import check
from nimble_jobs.kernels import squeeze_excite_pass
from nimble_jobs.kernels.squeeze_excite import PREFIX, Shape, compiled
from nimble_jobs.kernels.static_triton import capability_of
from nimble_jobs.planner.sources.source import Source, Variants, record_source

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # Inductor imports what is deprecated


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    ("images", "channels", "side", "hidden", "silu", "sigmoid"),
    [
        (1, 32, 112, 8, True, True),
        (1, 1152, 7, 48, True, True),
        (3, 960, 7, 240, False, False),
        (64, 20, 5, 3, True, False),
    ],
)
def test_the_kernels_agree_with_fp64(
    kind: str, images: int, channels: int, side: int, hidden: int, silu: bool, sigmoid: bool, device: torch.device
) -> None:
    """Also where blocks of channels and pixels are not full."""
    shape = Shape(
        dtype=kind, images=images, channels=channels, height=side, width=side, hidden=hidden, silu=silu, sigmoid=sigmoid
    )

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device=device).to(dtype(kind))

    x = random(images, channels, side, side).contiguous(memory_format=torch.channels_last)
    weight, bias, gate_weight, gate_bias = (
        random(*s) for s in ((hidden, channels), (hidden,), (channels, hidden), (channels,))
    )
    parts = torch.full((images, shape.parts, hidden), float("nan"), device=device)
    out = torch.full_like(x, float("nan"))
    squeeze, excite = compiled(shape, capability_of(device))
    squeeze(x, weight, parts)
    excite(x, parts, bias, gate_weight, gate_bias, out)
    inner = x.double().mean((2, 3)) @ weight.double().t() + bias.double()
    inner = functional.silu(inner) if silu else inner.relu()
    gate = inner @ gate_weight.double().t() + gate_bias.double()
    gate = gate.sigmoid() if sigmoid else functional.hardsigmoid(gate)
    exact = x.double() * gate[:, :, None, None]
    assert relative_norm(out, exact) < {"float16": 1e-3, "bfloat16": 1e-2, "float32": 1e-5}[kind]


class Block(nn.Module):
    """A part of EfficientNet."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Conv2d(8, 96, 1), nn.Conv2d(96, 16, 1)
        self.fc1, self.fc2 = nn.Conv2d(96, 4, 1), nn.Conv2d(4, 96, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.silu(self.before(x))
        scale = self.fc2(functional.silu(self.fc1(functional.adaptive_avg_pool2d(x, 1))))
        return self.after(torch.sigmoid(scale) * x)


def test_a_schedule_with_them_agrees_with_eager(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two streams, on a captured replay over fresh inputs."""
    monkeypatch.setattr(squeeze_excite_pass, "is_faster", lambda *_: True)
    torch.manual_seed(0)
    module = Block().eval().to(device, torch.float16)
    source = Source(kernels="epilogues", layout="channels-last")
    bound = Variants(module).use(source)
    x = torch.randn(2, 8, 28, 28, device=device, dtype=torch.float16)
    with torch._inductor.config.patch(force_disable_caches=True):
        recording = record_source(bound, source, {"x": x}, device)
    assert sum(task.op.startswith(PREFIX) for task in recording.program.tasks) == 2
    plan, _ = graph.make_plan(recording.program, max_streams=2)
    instance = capture(
        recording.program,
        plan,
        state=state_of(bound),
        constants=recording.constants,
        device=device,
        kernels=recording.kernels,
    )
    for seed in range(3):
        check(instance, module, recording.program.inputs, device, tolerance=1e-2, seed=seed)
    instance.close()
