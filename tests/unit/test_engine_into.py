"""Operators as calls that fill a buffer: whichever torch has a variant for, it computes the same, or is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F  # noqa: N812

from nimble_jobs.engine.into import into_buffers
from nimble_jobs.engine.private.modes import TorchDispatchMode, modes_off
from nimble_jobs.engine.private.operators import has_kernel
from nimble_jobs.engine.record import record, state_of
from nimble_jobs.errors import CannotRecord

CPU = torch.device("cpu")


class Variants(TorchDispatchMode):
    """Calls every variant over memory that holds something else, and compares it with the operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.used: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        result = op(*args, **kwargs)
        with modes_off():
            found = None if any(a.alias_info for a in op._schema.arguments) else into_buffers(op, args, kwargs, result)
            if found is None:
                return result
            variant, given, filling = found
            names = [a.name for a in variant._schema.arguments if a.is_out]
            arena = {
                n: torch.full((filling[n].untyped_storage().nbytes() + 64,), 0xA5, dtype=torch.uint8) for n in names
            }
            outs = {
                n: torch.empty(0, dtype=filling[n].dtype).set_(
                    arena[n].untyped_storage(), filling[n].storage_offset(), filling[n].shape, filling[n].stride()
                )
                for n in names
            }
            variant(*given, **{**filling, **outs})
            for name in names:
                whole = filling[name].untyped_storage().nbytes()
                assert arena[name].untyped_storage().nbytes() == whole + 64, f"{variant} resized what it filled"
                assert bool((arena[name][whole:] == 0xA5).all()), f"{variant} wrote behind what it filled"
                assert (
                    outs[name]
                    .contiguous()
                    .reshape(-1)
                    .view(torch.uint8)
                    .equal(filling[name].contiguous().reshape(-1).view(torch.uint8))
                ), f"{variant} computed something else"
            self.used.append(str(variant))
        return result


CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "arithmetic": lambda x, y: [x + y, x * 2, x - y, x / (y.abs() + 1), x.pow(2), torch.maximum(x, y), x.clamp(0, 1)],
    "unary": lambda x, y: [x.sigmoid(), x.tanh(), x.exp(), x.abs().sqrt(), F.gelu(x), F.silu(x), F.hardtanh(x), -x],
    "reductions": lambda x, y: [x.sum(), x.mean(dim=(2, 3)), x.amax(1), x.sum(0, keepdim=True), x.argmax(1), x.std(1)],
    "products": lambda x, y: [x[0, 0] @ y[0, 0].T, torch.addmm(x[0, 0, 0], x[0, 0], y[0, 0].T), x[0].bmm(y[0].mT)],
    "pools": lambda x, y: [F.max_pool2d(x, 2), F.avg_pool2d(x, 2), F.adaptive_avg_pool2d(x, 3)],
    "joins": lambda x, y: [torch.cat([x, y], 1), torch.stack([x, y]), torch.where(x > 0, x, y), x.repeat(2, 1, 1, 1)],
    "softmax": lambda x, y: [x.softmax(1), x.log_softmax(-1), F.layer_norm(x, x.shape[1:])],
    "indices": lambda x, y: [x.index_select(1, torch.tensor([1, 0])), x.gather(1, y.argsort(1)), x.topk(2, 1)[0]],
    "resampling": lambda x, y: [F.interpolate(x, scale_factor=2), F.interpolate(x, (9, 9), mode="bilinear"), x.roll(1)],
    "normalisation": lambda x, y: [F.batch_norm(x, y.mean((0, 2, 3)), y.var((0, 2, 3))), F.group_norm(x, 2)],
    "types": lambda x, y: [x.double(), (x > y), x.to(torch.int64), x.bool() & y.bool(), x.isnan()],
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels-last"])
def test_variants_compute_what_operators_do(name: str, layout: torch.memory_format) -> None:
    """Bit for bit, in place and strides too, and nothing behind the buffer is touched."""
    torch.manual_seed(0)
    x, y = (torch.randn(2, 4, 6, 6).contiguous(memory_format=layout) for _ in range(2))
    with torch.no_grad(), Variants() as mode:
        CALLS[name](x, y)
    assert mode.used


@given(st.sampled_from(["none", "mean", "sum"]), st.booleans())
def test_what_uses_its_result_as_scratch_is_left_alone(reduction: str, weighted: bool) -> None:
    """Such a variant would write behind the buffer that the plan gave it."""

    class Loss(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = x + 1 if weighted else None
            return F.binary_cross_entropy(x.sigmoid(), x.sigmoid().round(), weight, reduction=reduction)

    module, x = Loss(), torch.rand(5, 5)
    program = record(module, {"x": x}, state_of(module), CPU, module).program
    scratch = [t.op for t in program.tasks if "binary_cross_entropy" in t.op]
    assert scratch == ["aten.binary_cross_entropy.default"]


TABLE = torch.zeros(3)


def writes_a_global(x: torch.Tensor) -> torch.Tensor:
    return x + TABLE.add_(1)


def reads_what_numpy_wrote(x: torch.Tensor) -> torch.Tensor:
    seen = torch.empty(3)
    seen.numpy()[:] = 4
    return x + seen


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (writes_a_global, r"aten\.add_\.Tensor at .*test_engine_into\.py:\d+ writes into a tensor that is neither"),
        (
            reads_what_numpy_wrote,
            r"aten\.add\.\w+ at .*test_engine_into\.py:\d+ reads memory that no earlier torch operator",
        ),
    ],
)
def test_memory_that_changes_unseen_is_refused(call: Callable[[torch.Tensor], torch.Tensor], message: str) -> None:
    """With the operator and the line."""
    with pytest.raises(CannotRecord, match=message):
        record(call, {"x": torch.zeros(3)}, {}, CPU)


def test_conjugates_are_computed() -> None:
    """A view that differs in a bit only becomes a task."""
    x = torch.randn(4, dtype=torch.complex64)
    program = record(lambda x: x.conj() * 2 + x.imag.neg(), {"x": x}, {}, CPU).program
    assert any("conj_physical" in t.op for t in program.tasks)


def test_operators_without_a_result_are_tasks() -> None:
    """An assertion on the device is replayed, too."""

    def call(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x > 0).all())
        return x + 1

    program = record(call, {"x": torch.ones(3)}, {}, CPU).program
    assert any("_assert_async" in t.op for t in program.tasks)


@pytest.mark.parametrize("kind", ["cpu", "xpu", "meta", "privateuseone"])
def test_every_type_of_device_can_be_asked_for_its_kernels(kind: str) -> None:
    """By its own name, though torch's dispatcher writes some of them otherwise: Meta, PrivateUse1."""
    assert has_kernel(torch.ops.aten.add.out, kind) is (kind in ("cpu", "meta"))
