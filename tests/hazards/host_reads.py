"""Values that forward reads on the host, in every form, and what it does with them."""

from __future__ import annotations

import ctypes
import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.hazards.case import Case, Cases, Data

CASES: list[Case] = []
case = Cases("host", CASES)


def x(data: Data) -> torch.Tensor:
    return data.floats(4)


def one(data: Data) -> torch.Tensor:
    return data.floats(1).view(())


def count(data: Data) -> torch.Tensor:
    return data.ints(5, 1).view(())


def read(form: Callable[[torch.Tensor], Any], name: str, call: Callable[[Data], Any] = x) -> None:
    """A case that scales by what `form` reads."""

    def scales(_: Any, t: torch.Tensor) -> torch.Tensor:
        return t.float() * float(form(t))

    scales.__name__ = name
    case(call)(scales)


def address(t: torch.Tensor) -> float:
    return (ctypes.c_float * t.numel()).from_address(t.data_ptr())[0] if t.device.type == "cpu" else float(t[0])


def saved(t: torch.Tensor) -> float:
    file = io.BytesIO()
    torch.save(t, file)
    return len(file.getvalue()) + float(torch.load(io.BytesIO(file.getvalue()), weights_only=True)[0])


read(lambda t: t[0].item(), "item")
read(lambda t: float(t[0]), "float_of")
read(lambda t: int(t[0]), "int_of")
read(lambda t: bool(t[0] > 0), "bool_of")
read(lambda t: complex(t[0]).real, "complex_of")
read(lambda t: t.tolist()[0], "tolist")
read(lambda t: t.cpu().numpy()[0], "numpy_of")
read(lambda t: np.asarray(t.cpu())[0], "asarray")
read(lambda t: np.array(t.cpu().tolist()).sum(), "array_of")
read(lambda t: np.from_dlpack(t.cpu())[0], "dlpack")
read(lambda t: memoryview(t.cpu().numpy())[0], "memory_view")
read(lambda t: float(np.mean(t.cpu().numpy())), "numpy_function")
read(lambda t: float(np.float32(t[0].cpu())), "numpy_scalar")
read(address, "address")
read(saved, "saved_bytes")
read(lambda t: t.untyped_storage()[0], "storage_byte")
read(lambda t: sum(t.untyped_storage().tolist()), "storage_list")
read(lambda t: bytes(t.cpu().untyped_storage())[3], "storage_bytes")
read(lambda t: t.cpu().numpy().tobytes()[3], "bytes_of")
read(lambda t: len(str(t)), "text")
read(lambda t: len(repr(t[0])), "repr_of")
read(lambda t: len(f"{t[0]:.3f}"), "formatted")
read(lambda t: hash(t.cpu().numpy().tobytes()) % 7, "hash_of_bytes")
read(lambda t: math.sqrt(abs(t[0])), "math_function")
read(lambda t: round(float(t[0])), "rounded")
read(lambda t: max(t.unbind()), "python_max")
read(lambda t: sorted(t.unbind())[0], "python_sorted")
read(lambda t: 1 if t[0] in (t[1], t[2]) else 2, "member_of")
read(lambda t: 1 if torch.equal(t, t.abs()) else 2, "equal")
read(lambda t: 1 if torch.allclose(t, t.abs()) else 2, "allclose")
read(lambda t: 1 if t.is_nonzero() else 2, "is_nonzero", one)
read(lambda t: 1 if (t > 0).all() else 2, "all_positive")
read(lambda t: 1 if not t.lt(0).any() else 2, "any_negative")
read(lambda t: t.nonzero().shape[0], "nonzero_count")
read(lambda t: t.clamp(-2, 2).round().unique().numel(), "unique_count")
read(lambda t: t[t > 0].numel(), "selected_count")
read(lambda t: torch.masked_select(t, t > 0).numel(), "masked_select_count")
read(lambda t: len(torch.where(t > 0)[0]), "where_count")
read(lambda t: torch.count_nonzero(t > 0).item(), "count_nonzero")
read(lambda t: t.argmax().item(), "argmax")
read(lambda t: t.max().item(), "maximum")
read(lambda t: len(range(t)), "range_of", count)
read(lambda t: [1, 2, 3, 4, 5][t], "index_of_a_list", count)
read(lambda t: (1, 2, 3, 4, 5, 6)[t:][0], "slice_of_a_tuple", count)
read(lambda t: len("a" * t), "times_a_string", count)
read(lambda t: torch.arange(int(t) + 1).numel(), "arange_of", count)
read(lambda t: torch.zeros(t + 1).numel(), "size_of", count)
read(lambda t: torch.ones(6)[: t + 1].numel(), "slice_of_a_tensor", count)
read(lambda t: divmod(int(t), 3)[1], "divmod_of", count)
read(lambda t: t.__index__() + 1, "dunder_index", count)
read(lambda t: torch.Size([t + 1]).numel(), "torch_size", count)
read(lambda t: torch.tensor([t, 1.0]).sum(), "tensor_of_tensors", one)
read(lambda t: torch.tensor(float(t.sum())), "tensor_of_a_float")
read(lambda t: torch.as_tensor(t.cpu().numpy()).sum(), "there_and_back")
read(lambda t: torch.from_numpy(t.cpu().numpy().copy()).sum(), "from_numpy")
read(lambda t: np.linalg.norm(t.cpu().numpy()), "numpy_norm")
read(lambda t: torch.finfo(t.dtype).eps * t.numel() + 1, "questions_without_values")
read(lambda t: t.shape[0] * t.dim() + t.element_size(), "questions_of_shape")
read(lambda t: list(t)[1], "iterated")
read(lambda t: [v.item() for v in t][1], "iterated_and_read")
read(lambda t: t.to("cpu", copy=True)[0], "copied_to_the_host")
read(lambda t: t.double().cpu().sum(), "moved_to_the_host")
read(lambda t: t.histc(4, -1, 1).cpu()[0], "histogram_on_the_host")


@case(x)
def branches_on_the_sum(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x.exp2() if x.sum() > 0 else -x


@case(x)
def branches_on_a_nan(_: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(x) if torch.isnan(x).any() else x * 2


@case(lambda d: d.floats(4) * (float("nan") if d.turn == 3 else 1))
def branches_on_a_nan_that_comes_late(_: Any, x: torch.Tensor) -> torch.Tensor:
    if torch.isnan(x.cpu().numpy()[0]) if False else np.isnan(x.cpu().numpy()).any():
        return torch.zeros_like(x)
    return x * 2


@case(lambda d: d.floats(4) * (100 if d.turn == 4 else 1))
def clips_an_outlier(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-5, 5) if max(x.abs().tolist()) > 90 else x


@case(x)
def loops_until_it_converges(_: Any, x: torch.Tensor) -> torch.Tensor:
    y = x
    while y.norm() > 1:
        y = y / 2
    return y


@case(x)
def raises_on_bad_values(_: Any, x: torch.Tensor) -> torch.Tensor:
    assert torch.isfinite(x).all(), "not finite"
    return x * 2


@case(x)
def asserts_on_the_device(_: Any, x: torch.Tensor) -> torch.Tensor:
    torch._assert_async(torch.isfinite(x).all())
    return x * 2


@case(lambda d: (d.floats(3, 5), d.lengths(3, 5)))
def loops_over_lengths(_: Any, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.stack([row[:k].sum() for row, k in zip(x, lengths.tolist(), strict=True)])


@case(lambda d: (d.floats(3, 5), d.lengths(3, 5)))
def loops_over_lengths_one_by_one(_: Any, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    for i, k in enumerate(lengths):
        y[i, :k] = x[i, :k]
    return y


@case(lambda d: (d.floats(6), torch.tensor([[3, 3], [1, 5], [5, 1], [2, 4], [4, 2], [6, 0]][d.turn])))
def splits_by_an_input(_: Any, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    a, b = torch.split(x, sizes.tolist())
    return a.sum() - 2 * b.sum()


@case(lambda d: (d.floats(6), torch.tensor([d.turn + 1 if d.turn < 5 else 3])))
def tensor_split_by_an_input(_: Any, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    a, b = torch.tensor_split(x, at.cpu())
    return a.sum() - 2 * b.sum()


@case(lambda d: (d.floats(3, 5), d.lengths(3, 5)))
def masks_by_lengths_on_the_device(_: Any, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return (x * (torch.arange(5, device=x.device) < lengths[:, None])).sum(1)


@case(lambda d: (d.floats(3, 5), d.lengths(3, 5)))
def cuts_at_the_longest(_: Any, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return x[:, : int(lengths.max())].mean(1)


@case(lambda d: (d.floats(4, 3), d.order(4)), recorded=True)
def gathers_by_an_order(_: Any, x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return x[order] * x.index_select(0, order) + torch.gather(x, 0, order[:, None].expand(4, 3))


@case(lambda d: (d.floats(4, 3), d.order(4)))
def gathers_on_the_host(_: Any, x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return torch.stack([x[i] for i in order.tolist()])


@case(lambda d: (d.floats(4, 3), d.ints(4, 1).view(())), recorded=True)
def picks_a_row_by_a_scalar_tensor(_: Any, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return x[i] * 2


@case(lambda d: (d.floats(4, 3), d.ints(4, 1).view(())))
def narrows_by_a_scalar_tensor(_: Any, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return torch.narrow(x, 0, i, 1) * 2


@case(lambda d: (d.floats(4, 3), d.ints(3, 4)))
def repeats_by_an_input(_: Any, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    return torch.repeat_interleave(x, times, dim=0).sum(0)


@case(lambda d: d.ints(5, 2, 3), recorded=True)
def one_hot_of_a_given_width(_: Any, i: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(i, 5).float()


@case(lambda d: torch.cat([d.ints(5, 5), torch.tensor([4], device=d.device)]))
def one_hot_of_unknown_width(_: Any, i: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(i).float()


@case(lambda d: d.ints(5, 7))
def counts_into_bins(_: Any, i: torch.Tensor) -> torch.Tensor:
    return torch.bincount(i, minlength=5).float()


@case(x, recorded=True)
def quantile_by_a_number(_: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.quantile(x, 0.3)


@case(x, lambda: {"q": torch.tensor([0.2, 0.7])})
def quantile_by_a_buffer(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.quantile(x, m.q)


@case(x, lambda: {"scale": torch.tensor(2.0)})
def reads_its_own_buffer(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x * m.scale.item()


@case(x, lambda: {"scale": torch.tensor(2.0)}, between=lambda m, turn: m.scale.fill_(turn))
def reads_a_buffer_that_changes(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x * m.scale.item()


@case(x, lambda: {"scale": torch.tensor([2.0])}, between=lambda m, turn: m.scale.fill_(turn))
def reads_a_buffer_that_changes_as_numpy(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x * m.scale.cpu().numpy()[0]


@case(x)
def a_constant_on_the_host(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x * torch.tensor([1.0, 2.0]).sum().item()


@case(x)
def reads_an_intermediate_late(_: Any, x: torch.Tensor) -> tuple[torch.Tensor, float]:
    y = x * 2
    return y, y.sum().item()


@case(x)
def prints_its_values(_: Any, x: torch.Tensor) -> torch.Tensor:
    str(x)
    return x * 2


@case(x)
def skips_what_it_cannot_read(_: Any, x: torch.Tensor) -> torch.Tensor:
    try:
        scale = float(x[0])
    except Exception:  # noqa: BLE001 - models do
        scale = 1.0
    return x * scale


@case(x)
def skips_what_numpy_cannot_read(_: Any, x: torch.Tensor) -> torch.Tensor:
    try:
        scale = float(x.cpu().numpy()[0])
    except Exception:  # noqa: BLE001
        scale = 1.0
    return x * scale


@case(x)
def reads_while_traced_only(_: Any, x: torch.Tensor) -> torch.Tensor:
    if torch.jit.is_tracing() or torch.compiler.is_compiling():
        return x * 2
    return x * 3


@case(lambda d: d.mask(2, 5))
def takes_a_short_cut_when_eager(_: Any, mask: torch.Tensor) -> torch.Tensor:
    """As libraries do: no mask at all where it would change nothing."""
    if not (torch.jit.is_tracing() or torch.compiler.is_compiling()) and mask.all():
        return torch.zeros(2, 5, device=mask.device)
    return torch.where(mask, 0.0, -1e9)


@case(lambda d: d.mask(2, 5))
def takes_a_wrong_short_cut_when_traced(_: Any, mask: torch.Tensor) -> torch.Tensor:
    if torch.jit.is_tracing() or torch.compiler.is_compiling():
        return torch.zeros(2, 5, device=mask.device)
    return torch.where(mask, 0.0, -1e9)


@case(lambda d: d.mask(2, 5), recorded=True)
def takes_a_short_cut_for_full_masks(_: Any, mask: torch.Tensor) -> torch.Tensor:
    if not torch.jit.is_tracing() and not torch.compiler.is_compiling() and bool(mask.all()):
        return mask.float()
    return mask.float() * mask.long()
