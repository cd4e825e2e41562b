"""oneDNN over packed weights: which tasks become its own, that results stay eager's, and who shares packed weights."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from nimble_jobs.engine import onednn
from nimble_jobs.engine.bind import Bound, arena_plan, bind, planned_bytes
from nimble_jobs.engine.onednn import ADDED, CONVOLUTION, LINEAR, OPERATORS, packed_bytes
from nimble_jobs.engine.record import Recording, record, state_of
from nimble_jobs.graph import Analysis, check_plan
from nimble_jobs.graph.buffers import without_unused
from nimble_jobs.kernels import onednn_pass
from nimble_jobs.kernels.onednn_pass import attention_in_parts, divides_attention, packs_weights, with_packed_weights
from nimble_jobs.planner.sources.source import Source, record_source
from nimble_jobs.schedule import BufferKind

CPU = torch.device("cpu")
EXACT = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def recorded(module: nn.Module, x: torch.Tensor) -> Recording:
    with torch.no_grad():
        return record(module, {"x": x}, state_of(module), CPU, module)


def packed(module: nn.Module, x: torch.Tensor) -> Recording:
    with attention_in_parts():
        return with_packed_weights(recorded(module, x))


def bound(recording: Recording, module: nn.Module) -> Bound:
    program = recording.program
    plan, _ = Analysis.of(program).single_stream()
    check_plan(program, plan)
    state = state_of(module)
    return bind(program, plan, state=state, constants=recording.constants, kernels=recording.kernels, device=CPU)


def ops(recording: Recording) -> Counter[str]:
    return Counter(task.op for task in recording.program.tasks)


def differ(module: nn.Module, recording: Recording, x: torch.Tensor) -> float:
    """The largest relative norm of an output's difference from eager, over two runs with other inputs."""
    instance, worst = bound(recording, module), 0.0
    for seed in range(2):
        value = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(x.dtype)
        with torch.no_grad():
            expected = module(value.contiguous(memory_format=_format(x)))
            instance.inputs["x"].copy_(value)
            found = instance.run()
        expected = expected if isinstance(expected, tuple) else (expected,)
        for right, ours in zip(expected, found.values(), strict=True):
            assert ours.shape == right.shape
            worst = max(worst, float((ours.double() - right.double()).norm() / right.double().norm()))
    return worst


def _format(x: torch.Tensor) -> torch.memory_format:
    images = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if images else torch.contiguous_format


def module_of(call: Callable[..., Any], *layers: nn.Module) -> nn.Module:
    """A module whose forward pass is `call(layers, x)`."""

    class Made(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layers)

        def forward(self, x: torch.Tensor) -> Any:
            return call(self.layers, x)

    return Made().eval()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 8, 3),
        nn.Conv2d(4, 8, 3, stride=2, padding=1, bias=False),
        nn.Conv2d(4, 8, (1, 5), padding=(0, 2), dilation=(1, 2), stride=(2, 1)),
        nn.Conv2d(4, 4, 3, groups=4, padding=1),
        nn.Conv2d(4, 8, 3, groups=2, padding="same"),
        nn.Conv2d(4, 1, 1),
        nn.Conv2d(4, 8, 9),  # one place is left
    ],
    ids=str,
)
def test_convolutions_equal_eager(layer: nn.Module, layout: torch.memory_format) -> None:
    module, x = nn.Sequential(layer).eval().to(memory_format=layout), torch.randn(2, 4, 9, 9)
    x = x.contiguous(memory_format=layout)
    recording = packed(module, x)
    assert ops(recording)[CONVOLUTION] == 1
    assert differ(module, recording, x) < EXACT[torch.float32]


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(1, 16, (1, 5), stride=(1, 3)), (1, 1, 2, 6)),
        (nn.Conv2d(8, 24, (1, 2), stride=(1, 3), groups=8), (2, 8, 4, 3)),
        (nn.Conv3d(3, 6, (2, 1, 5), padding=(1, 0, 2), groups=3), (1, 3, 1, 7, 7)),
        (nn.Conv2d(1, 16, 1, stride=3, padding=(1, 2)), (1, 1, 9, 1)),
        (nn.Conv2d(3, 16, 1, padding=1), (1, 3, 9, 9)),
    ],
    ids=str,
)
def test_what_onednn_computes_wrong_or_reads_beyond_is_left_to_eager(layer: nn.Module, shape: tuple[int, ...]) -> None:
    """Whether weights are packed or not: groups of one channel that become one column or a volume, in which some types
    are read from memory that nothing has written; kernels within the padding, which end the process."""
    module, x = nn.Sequential(layer).eval(), torch.randn(shape)
    assert not set(ops(packed(module, x))) & set(OPERATORS)


def test_volumes_are_packed_and_sequences_and_transposed_convolutions_are_not() -> None:
    """oneDNN's operators in torch take two and three dimensions."""
    volume, x = nn.Sequential(nn.Conv3d(2, 4, 3)).eval(), torch.randn(1, 2, 5, 5, 5)
    assert ops(packed(volume, x)) == {CONVOLUTION: 1}
    assert differ(volume, packed(volume, x), x) < EXACT[torch.float32]
    for module, shape in ((nn.Conv1d(2, 4, 3), (1, 2, 9)), (nn.ConvTranspose2d(2, 4, 3), (1, 2, 9, 9))):
        assert not set(ops(packed(nn.Sequential(module).eval(), torch.randn(shape)))) & set(OPERATORS)


@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8), (1, 8)])
@pytest.mark.parametrize("layer", [nn.Linear(8, 6), nn.Linear(8, 6, bias=False)], ids=str)
def test_linear_layers_equal_eager(layer: nn.Module, shape: tuple[int, ...]) -> None:
    module, x = nn.Sequential(layer).eval(), torch.randn(shape)
    recording = packed(module, x)
    assert ops(recording) == {LINEAR: 1}
    assert differ(module, recording, x) < EXACT[torch.float32]


class Transposed(nn.Module):
    """A linear layer whose weight is kept as [in, out], over rows with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x[:, 0], self.weight)


def test_weights_may_be_kept_the_other_way_round_and_rows_may_have_gaps() -> None:
    module, x = Transposed().eval(), torch.randn(4, 3, 8)
    assert ops(packed(module, x)) == {LINEAR: 1}
    assert differ(module, packed(module, x), x) < EXACT[torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_are_packed_where_the_processor_computes_in_them(dtype: torch.dtype) -> None:
    module, x = nn.Sequential(nn.Linear(16, 8), nn.ReLU()).eval().to(dtype), torch.randn(4, 16, dtype=dtype)
    recording = packed(module, x)
    if dtype is torch.float64:
        assert recording.program == recorded(module, x).program
    elif LINEAR in ops(recording):
        assert differ(module, recording, x) < EXACT[dtype]


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "silu_": lambda x: functional.silu(x, inplace=True),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": functional.gelu,
    "gelu tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "hardswish": functional.hardswish,
}
APART: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": functional.relu,
    "relu_": functional.relu_,
    "relu6": functional.relu6,
    "hardtanh": lambda x: functional.hardtanh(x, -0.5, 0.25),
    "hardsigmoid": functional.hardsigmoid,
    "leaky_relu": functional.leaky_relu,
    "leaky_relu 0": lambda x: functional.leaky_relu(x, 0.0),
}
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "pixels": (lambda: nn.Conv2d(16, 5, 1), (2, 16, 6, 6)),
    "3x3": (lambda: nn.Conv2d(3, 16, 3, stride=2), (1, 3, 9, 9)),
    "depthwise": (lambda: nn.Conv2d(16, 16, 3, padding=1, groups=16), (1, 16, 6, 6)),
    "volumes": (lambda: nn.Conv3d(2, 4, 3), (1, 2, 5, 5, 5)),
    "linear": (lambda: nn.Linear(16, 70), (40, 16)),
    "row": (lambda: nn.Linear(16, 7), (1, 16)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("images", [True, False])
def test_an_activation_becomes_part_of_what_it_follows(name: str, images: bool) -> None:
    layer = nn.Conv2d(3, 4, 3) if images else nn.Linear(8, 6)
    module = module_of(lambda layers, x: ACTIVATIONS[name](layers[0](x)), layer)
    x = torch.randn(2, 3, 8, 8) if images else torch.randn(2, 5, 8)
    recording = packed(module, x)
    assert ops(recording) == {CONVOLUTION if images else LINEAR: 1}
    assert differ(module, recording, x) < EXACT[torch.float32]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e38, -1e38])
def test_what_is_no_finite_number_in_eager_is_none_here(layer: str, value: float) -> None:
    """oneDNN's ReLU and its like make numbers of NaN, so eager's follow instead."""
    make, shape = LAYERS[layer]
    for name, call in {**ACTIVATIONS, **APART}.items():
        module, x = module_of(lambda layers, x, call=call: call(layers[0](x)), make()), torch.randn(shape)
        instance = bound(packed(module, x), module)
        x.view(-1)[x.numel() // 3] = value
        instance.inputs["x"].copy_(x)
        with torch.no_grad():
            expected, (found,) = module(x), instance.run().values()
        assert torch.equal(found.isnan(), expected.isnan()), name
        assert torch.equal(found.isinf(), expected.isinf()), name


@pytest.mark.parametrize("name", APART)
def test_activations_that_would_lose_nan_stay_eagers(name: str) -> None:
    module, x = module_of(lambda layers, x: APART[name](layers[0](x)), nn.Linear(8, 6)), torch.randn(5, 8)
    recording = packed(module, x)
    assert ops(recording).total() == 2
    assert differ(module, recording, x) < EXACT[torch.float32]


def test_what_is_needed_before_its_activation_is_kept() -> None:
    """It is returned, or read by something else."""

    def returned(layers: nn.ModuleList, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = layers[0](x)
        return y, torch.sigmoid(y)

    def read(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        y = layers[0](x)
        return torch.sigmoid(y) * y

    def read_first(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        y = layers[0](x)
        z = y * 2
        return y.sigmoid_() + z

    for call in (returned, read, read_first):
        module, x = module_of(call, nn.Conv2d(3, 4, 3)), torch.randn(2, 3, 8, 8)
        recording = packed(module, x)
        assert sum("sigmoid" in op for op in ops(recording)) == 1
        assert differ(module, recording, x) < EXACT[torch.float32]


def test_part_of_a_result_is_not_activated_for_all_of_it() -> None:
    def call(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        y = layers[0](x)
        y[:, :2].sigmoid_()
        return y

    module, x = module_of(call, nn.Conv2d(3, 4, 3)), torch.randn(2, 3, 8, 8)
    assert differ(module, packed(module, x), x) < EXACT[torch.float32]


def test_a_residual_is_added_in_place() -> None:
    """The tensor that goes around the block takes in what comes out of it."""

    def call(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        around = layers[0](x)
        out = layers[2](functional.silu(layers[1](around), inplace=True))
        out += around
        return out.relu_() * 2

    layers = [nn.Conv2d(n, 4, 3, padding=1) for n in (3, 4, 4)]
    for layout in (torch.channels_last, torch.contiguous_format):
        module = module_of(call, *layers).to(memory_format=layout)
        x = torch.randn(2, 3, 8, 8).contiguous(memory_format=layout)
        recording = packed(module, x)
        assert ops(recording) == {CONVOLUTION: 2, ADDED: 1, "aten.relu_.default": 1, "aten.mul.out": 1}
        assert differ(module, recording, x) < EXACT[torch.float32]


def test_a_summand_that_is_read_by_the_convolution_itself_is_not_overwritten() -> None:
    """In place, the sum would destroy what the convolution still reads."""

    def call(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        first = layers[0](x)
        return layers[1](first) + first

    module, x = module_of(call, nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, padding=1)), torch.randn(2, 3, 8, 8)
    assert ADDED not in ops(packed(module, x))
    assert differ(module, packed(module, x), x) < EXACT[torch.float32]


def test_both_summands_may_be_convolutions() -> None:
    def call(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(layers[0](x) + layers[1](x)) * 2

    for first, second in ((1, 3), (3, 1)):
        layers = (nn.Conv2d(3, 4, k, padding=k // 2) for k in (first, second))
        module, x = module_of(call, *layers), torch.randn(2, 3, 8, 8)
        recording = packed(module, x)
        assert ops(recording)[CONVOLUTION] == ops(recording)[ADDED] == 1
        assert not any("add" in op.lower() for op in ops(recording) if op not in OPERATORS)
        assert differ(module, recording, x) < EXACT[torch.float32]


def test_a_summand_that_is_needed_later_is_not_overwritten() -> None:
    def later(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        kept = x * 2
        return layers[0](x) + kept, kept

    def the_input(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        return layers[0](x) + x

    for call in (later, the_input):
        module, x = module_of(call, nn.Conv2d(3, 3, 3, padding=1)), torch.randn(2, 3, 8, 8)
        assert ADDED not in ops(packed(module, x))
        assert differ(module, packed(module, x), x) < EXACT[torch.float32]


def test_biases_with_gaps_are_not_packed() -> None:
    """oneDNN would read what lies in the gaps, or behind the bias."""

    class Gaps(nn.Module):
        def __init__(self, images: bool, expanded: bool) -> None:
            super().__init__()
            self.images, self.expanded = images, expanded
            self.weight = nn.Parameter(torch.randn(4, 3, 1, 1) if images else torch.randn(4, 3))
            self.bias = nn.Parameter(torch.randn(1 if expanded else 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            bias = self.bias.expand(4) if self.expanded else self.bias[::2]
            return functional.conv2d(x, self.weight, bias) if self.images else functional.linear(x, self.weight, bias)

    for images, expanded in ((True, True), (True, False), (False, True), (False, False)):
        module, x = Gaps(images, expanded).eval(), torch.randn((2, 3, 5, 5) if images else (2, 3))
        assert not set(ops(packed(module, x))) & set(OPERATORS)
        assert differ(module, packed(module, x), x) < EXACT[torch.float32]


class Moving(nn.Module):
    """A layer whose weight changes with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer.weight.data.mul_(1.5)
        return self.layer(x)


def test_weights_that_the_program_writes_are_not_packed() -> None:
    module, x = Moving().eval(), torch.randn(2, 4)
    assert not set(ops(packed(module, x))) & set(OPERATORS)


def test_products_of_two_inputs_are_left_alone() -> None:
    module, x = module_of(lambda _, x: x @ x.t()), torch.randn(4, 4)
    assert packed(module, x).program == recorded(module, x).program
    assert not packs_weights(recorded(module, x).program)
    assert packs_weights(recorded(nn.Sequential(nn.Linear(4, 4)).eval(), x).program)


def test_nothing_is_packed_without_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn_pass, "has_onednn", lambda: False)
    module, x = nn.Sequential(nn.Linear(4, 4)).eval(), torch.randn(2, 4)
    assert packed(module, x).program == recorded(module, x).program


def test_attention_is_recorded_layer_by_layer() -> None:
    """torch's own fast path is one operator that holds four products."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).eval()
    x = torch.randn(2, 5, 8)
    assert ops(with_packed_weights(recorded(layer, x)))[LINEAR] == 2
    recording = packed(layer, x)
    assert ops(recording)[LINEAR] == 4
    assert torch.backends.mha.get_fastpath_enabled()
    assert differ(layer, recording, x) < EXACT[torch.float32]


class Masked(nn.Module):
    """Attention over words, of which zeros are hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.attention = nn.Embedding(5, 8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.words(x)
        attended: torch.Tensor = self.attention(y, y, y, key_padding_mask=x == 0, need_weights=False)[0]
        return attended


def test_attention_with_a_mask_stays_whole() -> None:
    """Where all words are hidden, eager's operator gives NaN, and its parts would not."""
    module, x = Masked().eval(), torch.tensor([[1, 2, 3], [1, 0, 0], [0, 0, 0]])
    assert not packs_weights(recorded(module, x).program)
    with torch.no_grad():
        recording = record_source(module, Source(kernels="onednn", layout="given"), {"x": x}, CPU)
    instance = bound(recording, module)
    instance.inputs["x"].copy_(x)
    with torch.no_grad():
        torch.testing.assert_close(*instance.run().values(), module(x), equal_nan=True)
    assert instance.run()["output"].isnan().any()


def test_attention_without_a_mask_is_divided_by_its_source() -> None:
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).eval(), torch.randn(2, 5, 8)
    assert divides_attention(recorded(layer, x).program)
    with torch.no_grad():
        recording = record_source(layer, Source(kernels="onednn", layout="given"), {"x": x}, CPU)
    assert ops(recording)[LINEAR] == 4
    assert torch.backends.mha.get_fastpath_enabled()


def test_instances_share_packed_weights_and_let_go_of_them() -> None:
    """Also those of programs for other batches."""
    gc.collect()
    before = len(onednn._PACKED)
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
    instances = [bound(packed(module, torch.randn(rows, 8)), module) for rows in (2, 5, 5)]
    for instance in instances:
        instance.run()
    assert len(onednn._PACKED) - before == 2
    del instance, instances
    gc.collect()
    assert len(onednn._PACKED) == before


def test_weights_that_were_written_since_are_packed_anew() -> None:
    module, x = nn.Sequential(nn.Linear(8, 8)).eval(), torch.randn(2, 8)
    recording = packed(module, x)
    first = bound(recording, module)
    first.run()
    with torch.no_grad():
        module[0].weight.mul_(2)
    assert differ(module, recording, x) < EXACT[torch.float32]


def test_packed_weights_count_as_memory() -> None:
    module, x = nn.Sequential(nn.Linear(64, 64)).eval(), torch.randn(2, 64)
    with_, without = packed(module, x), recorded(module, x)
    assert packed_bytes(with_.program) == 64 * 64 * 4
    assert packed_bytes(without.program) == 0
    assert bound(with_, module).nbytes > 64 * 64 * 4
    plan, _ = Analysis.of(with_.program).single_stream()
    assert planned_bytes(with_.program, plan, arena_plan(with_.program, plan), CPU) > 64 * 64 * 4


def test_a_weight_counts_for_each_size_that_it_is_packed_for() -> None:
    """As heads of detectors do, which run over pictures of several sizes."""

    def call(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        return layers[0](x).sum() + layers[0](x[:, :, ::2, ::2]).sum() + layers[0](x * 2).sum()

    gc.collect()
    before = len(onednn._PACKED)
    module, x = module_of(call, nn.Conv2d(4, 8, 3)), torch.randn(2, 4, 9, 9)
    recording = packed(module, x)
    instance = bound(recording, module)
    instance.run()
    assert len(onednn._PACKED) - before == 2
    assert packed_bytes(recording.program) == 2 * module.layers[0].weight.nbytes


def test_buffers_that_nothing_touches_are_taken_out() -> None:
    """And no other ones: inputs and state stay, though no task reads them."""
    module = module_of(lambda layers, x: torch.relu(layers[0](x)), nn.Linear(4, 4))
    program = recorded(module, torch.randn(2, 4)).program
    shorter = replace(program, tasks=program.tasks[1:])
    assert without_unused(shorter).buffers == program.buffers
    assert without_unused(replace(program, tasks=())).buffers == tuple(
        replace(b, index=i)
        for i, b in enumerate(
            b
            for b in program.buffers
            if b.kind is not BufferKind.INTERMEDIATE or b.index in {p.view.buffer for p in program.outputs}
        )
    )


# Networks of convolutions, sums and activations in any order, in place or not


STEP = st.tuples(
    st.sampled_from(
        ["conv", "conv", "conv", "add", "add", "add_", "relu", "silu", "silu_", "mul", "slice_", "keep"],
    ),
    st.integers(0, 2),  # how long ago the values were made
    st.integers(0, 3),
)


class Network(nn.Module):
    """Each step makes a value of one or two earlier ones, or changes one in place."""

    def __init__(self, steps: list[tuple[str, int, int]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.steps = steps
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in steps)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, kept = [x + 0.5], []
        for (name, a, b), layer in zip(self.steps, self.layers, strict=True):
            first, second = values[-1 - a % len(values)], values[-1 - b % len(values)]
            match name:
                case "conv":
                    values.append(layer(first))
                case "relu":
                    values.append(torch.relu(first))
                case "silu":
                    values.append(functional.silu(first))
                case "silu_":
                    functional.silu(first, inplace=True)
                case "add":
                    values.append(first + second)
                case "add_":
                    first.add_(second)
                case "mul":
                    values.append(first * 0.5)
                case "slice_":
                    first[:, 1:3].add_(1.0)
                case "keep":
                    kept.append(first)
        return (*kept, values[-1])


@settings(max_examples=120, deadline=None)
@given(st.lists(STEP, min_size=4, max_size=12), st.booleans())
def test_networks_equal_eager(steps: list[tuple[str, int, int]], channels_last: bool) -> None:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    module = Network(steps).eval().to(memory_format=layout)
    x = torch.randn(1, 4, 6, 6).contiguous(memory_format=layout)
    recording = packed(module, x)
    assert len(recording.program.tasks) <= len(recorded(module, x).program.tasks)
    assert differ(module, recording, x) < EXACT[torch.float32]
