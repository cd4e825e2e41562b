"""Merging: which linear layers become one product, that the module then computes the same, and that it runs once."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from nimble_jobs.engine.record import record, state_of
from nimble_jobs.errors import EngineError
from nimble_jobs.kernels.shared_products import share_products
from nimble_jobs.planner.sources.merge import Groups, merge, mergeable
from nimble_jobs.planner.sources.source import Source, Variants

CPU = torch.device("cpu")
GROUPS: Groups = (("q", "k", "v"), ("gate", "up"))


class Block(nn.Module):
    """Attention and a gated layer: two groups, and layers that belong to none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.out = (nn.Linear(8, n) for n in (8, 8, 4, 8))
        self.out = nn.Linear(4, 8)
        self.gate, self.up = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))
        x = x + self.out(mixed)
        return self.down(functional.silu(self.gate(x)) * self.up(x))


def groups_of(module: nn.Module) -> Groups:
    module = module.eval()
    with torch.no_grad():
        recording = record(module, {"x": torch.randn(2, 5, 8)}, state_of(module), CPU, module)
    return mergeable(recording.program, module)


def test_layers_that_read_the_same_are_found() -> None:
    """Whatever their numbers of features; the layers after them read something else."""
    assert groups_of(Block()) == GROUPS


def _hooked(block: Block) -> None:
    block.k.register_forward_hook(lambda *_: None)


def _tied(block: Block) -> None:
    block.k.weight = block.q.weight


def _other_kind(block: Block) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    block.k = Scaled(8, 8)


def _without_bias(block: Block) -> None:
    block.k = nn.Linear(8, 8, bias=False)


@pytest.mark.parametrize("change", [_hooked, _tied, _other_kind, _without_bias])
def test_layers_that_are_called_otherwise_stay(change: Callable[[Block], None]) -> None:
    """A layer with a hook, a weight of two layers, a class of its own or no bias is in no group with the others."""
    block = Block()
    change(block)
    found = groups_of(block)
    assert all("k" not in group for group in found)
    assert ("gate", "up") in found


class WritesBetween(nn.Module):
    """What the second layer reads has been changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        first = self.a(x)
        x += 1
        return first + self.b(x)


def test_a_tensor_that_is_written_between_is_not_the_same() -> None:
    assert groups_of(WritesBetween()) == ()


def test_a_merged_module_computes_the_same_and_leaves_the_given_one() -> None:
    """With the weights of its time; the module itself, its tensors and its names are untouched."""
    block = Block().eval()
    twin = copy.deepcopy(block)
    x = torch.randn(2, 5, 8)
    variants = Variants(block)
    merged = variants.use(Source(kernels="eager", layout="given", merged=GROUPS))
    assert merged.get_parameter("q.weight").shape == (20, 8)
    assert merged.get_parameter("q.weight") is merged.get_parameter("v.weight")
    assert "gate.bias" not in state_of(merged)
    with torch.no_grad():
        assert torch.allclose(merged(x), twin(x), atol=1e-6)
        block.v.weight.mul_(3.0)
        assert not torch.allclose(variants.use()(x), twin(x), atol=1e-3)
        assert torch.allclose(
            variants.use(Source(kernels="eager", layout="given", merged=GROUPS))(x), block(x), atol=1e-6
        )
    assert variants.use() is block
    assert type(block.q) is nn.Linear


@pytest.mark.parametrize("group", [("q", "nothing"), ("q", "")])
def test_a_schedule_of_another_module_is_refused(group: tuple[str, ...]) -> None:
    with pytest.raises(EngineError, match="cannot be merged"):
        merge(Block(), (group,))


def test_a_merged_product_runs_once() -> None:
    """As it is recorded: one product for each group and one for each other layer, whichever layer asks first."""
    block = Block().eval()
    merge(block, (("k", "q", "v"), ("gate", "up")))
    with torch.no_grad():
        recording = record(block, {"x": torch.randn(2, 5, 8)}, state_of(block), CPU, block)
    products = [t.op for t in recording.program.tasks if t.op.startswith(("aten.addmm.", "aten.mm."))]
    assert len(products) == 4


def test_a_merged_product_is_made_anew_after_a_write() -> None:
    """Into what the layers read; and for another tensor, at the same place."""
    module = WritesBetween()
    twin = copy.deepcopy(module)
    merge(module, (("a", "b"),))
    with torch.no_grad():
        for seed in range(3):
            x = torch.randn(2, 8, generator=torch.Generator().manual_seed(seed))
            assert torch.allclose(module(x), twin(x), atol=1e-6)
            assert torch.allclose(module.a(x), twin.a(x), atol=1e-6)  # asked for once: the product is not let go
            del x
    with torch.inference_mode():
        x = torch.randn(2, 8)
        assert torch.allclose(module(x), twin(x), atol=1e-6)


def test_a_merged_product_is_one_in_a_compiled_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three and two equal products one each is left, and the graph computes what it did."""
    block = Block().eval()
    merge(block, GROUPS)
    x = torch.randn(2, 5, 8)
    state = {**dict(block.named_parameters())}

    def call(state: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(block, state, (x,), tie_weights=True)

    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with torch.no_grad():
        traced = make_fx(call)(state, x)
        before = traced(state, x)
        assert share_products(traced.graph) == 3
        traced.recompile()
        assert torch.equal(traced(state, x), before)
        products = [n for n in traced.graph.nodes if str(n.target).startswith(("aten.addmm", "aten.mm"))]
    assert len(products) == 4
