"""Views, shared memory and in-place writes: of inputs, of state, of outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.hazards.case import Case, Cases, Data

CASES: list[Case] = []
case = Cases("aliasing", CASES)


def x(data: Data) -> torch.Tensor:
    return data.floats(3, 4)


def grid() -> dict[str, Any]:
    return {"g": torch.zeros(3, 4)}


@case(x, recorded=True)
def writes_into_its_input(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2) + 1


@case(x, recorded=True)
def writes_into_a_view_of_its_input(_: Any, x: torch.Tensor) -> torch.Tensor:
    x[1:].relu_()
    return x.sum(0)


@case(x, recorded=True)
def writes_into_a_transposed_view(_: Any, x: torch.Tensor) -> torch.Tensor:
    x.t()[::2].fill_(3)
    return x * 2


@case(lambda d: d.floats(4, 3).t(), recorded=True)
def writes_into_a_transposed_input(_: Any, x: torch.Tensor) -> torch.Tensor:
    x.view(-1, 1) if x.is_contiguous() else x.add_(1)
    return x * 2


@case(lambda d: d.floats(6, 8)[::2, 1::2])
def writes_into_a_strided_input(_: Any, x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * 2


@case(lambda d: d.floats(1, 4).expand(3, 4), recorded=True)
def reads_an_expanded_input(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(0)


@case(lambda d: d.floats(3, 4).t().unsqueeze(0), recorded=True)
def returns_a_transposed_input(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x


@case(lambda d: d.floats(3, 4, 5, 6).to(memory_format=torch.channels_last), recorded=True)
def keeps_channels_last(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2


@case(lambda d: (lambda t: (t, t))(d.floats(3, 4)))
def the_same_tensor_twice(_: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.relu() - b


@case(lambda d: (lambda t: (t, t))(d.floats(3, 4)))
def the_same_tensor_twice_and_written(_: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.add_(1)
    return a * b


@case(lambda d: (lambda t: (t[:3], t[1:]))(d.floats(4, 4)), recorded=None)
def inputs_that_overlap_and_are_written(_: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.add_(1)
    return a * b


@case(lambda d: (lambda t: (t[:2], t[2:]))(d.floats(4, 4)), recorded=True)
def inputs_side_by_side_and_written(_: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.add_(1)
    return a * b


@case(lambda d: (lambda t: (t, t) if d.turn else (t, t.clone()))(d.floats(3, 4)))
def the_same_tensor_twice_but_not_in_the_example(_: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.add_(1)
    return a * b


@case(lambda d: (lambda t: (t, t.clone()) if d.turn else (t, t))(d.floats(3, 4)))
def the_same_tensor_twice_only_in_the_example(_: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a * 2 if a is b else a + b


@case(lambda d: (lambda t: (t, t[0] if d.turn else t[0].clone()))(d.floats(3, 4)))
def an_input_that_is_a_view_of_another(_: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.mul_(2)
    return a + b


@case(lambda d: (lambda t: (t, t.clone() if d.turn % 2 else t))(d.floats(3, 4)))
def asks_for_the_address(_: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a * 2 if a.data_ptr() == b.data_ptr() else a * 3


@case(x, grid, recorded=True)
def writes_into_a_view_of_a_buffer(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.g[1].add_(x[0])
    return m.g + x


@case(x, grid, recorded=True)
def writes_through_a_chain_of_views(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.g.view(2, 6).t()[1:3].unsqueeze(0).mul_(0.5).add_(x.mean())
    return m.g * x


@case(x, grid)
def returns_its_buffer(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.g.add_(x)
    return m.g


@case(x, grid)
def returns_a_view_of_its_buffer(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    m.g.add_(x)
    return m.g[1:], m.g.t()


@case(x, recorded=True)
def returns_its_input(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x


@case(x, recorded=True)
def returns_views_of_its_input(_: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x[0], x.t(), x.view(-1), x.detach(), x.unsqueeze(1)


@case(x, recorded=True)
def returns_its_input_before_it_writes(_: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    kept = x[0]
    x.zero_()
    return kept, x + 1


@case(x, recorded=True)
def returns_a_clone_before_it_writes(_: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    kept = x[0].clone()
    x.zero_()
    return kept, x + 1


@case(x, recorded=True)
def outputs_that_share_memory(_: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y = x.exp2()
    return y, y[1], y.t()


@case(x, recorded=True)
def the_same_output_twice(_: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    y = x.exp2()
    return {"a": y, "b": y}


@case(x, recorded=True)
def an_expanded_output(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x.sum(0).expand(5, 4)


@case(x, recorded=True)
def an_output_of_another_stride(_: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided((4, 3), (1, 4), device=x.device).copy_(x.t()).t().t()


@case(x, recorded=True)
def a_slice_of_an_output(_: Any, x: torch.Tensor) -> torch.Tensor:
    return (x * 2)[:, 1:3]


@case(x, recorded=True)
def as_strided_over_a_result(_: Any, x: torch.Tensor) -> torch.Tensor:
    return (x * 2).as_strided((2, 5), (4, 1), 1)


@case(x)
def as_strided_over_its_input(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((2, 3), (3, 1), 1) * 2


@case(lambda d: d.floats(8, 4)[2:5])
def as_strided_before_its_input(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((4, 4), (4, 1), 0) * 2


@case(lambda d: d.floats(3, 4) if d.turn % 2 else d.floats(4, 3).t())
def asks_whether_its_input_is_contiguous(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.is_contiguous() else x * 3


@case(lambda d: d.floats(3, 4) if d.turn % 2 else d.floats(4, 3).t())
def asks_for_a_stride(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x * x.stride(0)


@case(lambda d: d.floats(8, 4)[d.turn : d.turn + 3])
def asks_for_an_offset(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x * (1 + x.storage_offset())


@case(lambda d: d.floats(3, 4) if d.turn % 2 else d.floats(4, 3).t())
def views_what_may_not_be_contiguous(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1) * torch.arange(12, device=x.device)


@case(lambda d: d.floats(4, 3).t() if d.turn % 2 else d.floats(3, 4))
def ravels_the_bytes(_: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    y.copy_(x)
    return y.as_strided((12,), (1,)) * 2


@case(x, grid)
def writes_to_an_alias_kept_in_a_list(m: Any, x: torch.Tensor) -> torch.Tensor:
    rows = list(m.g.unbind(0))
    rows[0].add_(x[0])
    torch._foreach_add_(rows, 1.0)
    return m.g * x


@case(x, recorded=True)
def foreach_over_its_inputs_rows(_: Any, x: torch.Tensor) -> torch.Tensor:
    torch._foreach_mul_(list(x.unbind(0)), 2.0)
    return x + 1


@case(lambda d: (d.floats(3, 4), d.floats(3, 4, salt=1)), recorded=True)
def writes_into_an_output_argument(_: Any, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    torch.add(x, 1, out=out)
    return out


@case(lambda d: (d.floats(3, 4), d.floats(0, salt=1)))
def resizes_an_output_argument(_: Any, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    torch.add(x, 1, out=out.resize_(3, 4))
    return out


@case(lambda d: (d.floats(3, 4), d.floats(2, 3, 4, salt=1)), recorded=True)
def writes_into_a_part_of_an_argument(_: Any, x: torch.Tensor, out: torch.Tensor) -> None:
    torch.add(x, 1, out=out[1])
    return out[0] + 0


@case(x, recorded=True)
def splits_and_writes(_: Any, x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    a, b = y.chunk(2, 1)
    a.add_(b)
    b.sub_(a)
    return y


@case(x, recorded=True)
def diagonal_write(_: Any, x: torch.Tensor) -> torch.Tensor:
    y = x @ x.t()
    y.diagonal().zero_()
    return y


@case(x, grid, recorded=True)
def index_put_into_a_buffer(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.g[[0, 2]] += x[:2]
    m.g[torch.tensor([1], device=x.device), 1:3] = 7.0
    return m.g.clone()


@case(lambda d: (d.floats(3, 4), d.order(3)), grid, recorded=True)
def scatters_rows_by_an_input(m: Any, x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    m.g[order] = x
    m.g.index_add_(0, order, x, alpha=0.5)
    return m.g.cumsum(0)


@case(lambda d: (d.floats(3, 4), d.floats(3, 4) > 0), grid, recorded=True)
def writes_where_a_mask_is_set(m: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    m.g[mask] = 1.0
    m.g.masked_fill_(~mask, -1.0)
    return m.g * x


@case(x, lambda: {"w": nn.Parameter(torch.ones(4))})
def returns_its_parameter(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return m.w, x * m.w


@case(x)
class AttendsToItsOwnBuffer(nn.Module):
    """Called with the module's own buffer, which forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("b", torch.ones(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.b.mul_(0.5).add_(x)
        return self.b @ self.b.t()


@case(lambda d: torch.view_as_real(d.floats(3, 4, dtype=torch.complex64)), recorded=True)
def a_real_view_of_complex_numbers(_: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(x.clone()).abs()


@case(lambda d: d.floats(3, 4, dtype=torch.complex64).conj())
def a_conjugated_input(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2


@case(lambda d: d.floats(3, 4, dtype=torch.complex64))
def a_conjugated_output(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x.exp().conj() if x.dim() > 9 else x.conj()


@case(lambda d: torch._neg_view(d.floats(3, 4)) if d.turn % 2 else d.floats(3, 4))
def a_negated_view_as_input(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2


@case(x, recorded=True)
def writes_under_no_grad_through_data(_: Any, x: torch.Tensor) -> torch.Tensor:
    x.data[0] = 5
    x.detach()[1].zero_()
    return x * 2


@case(x)
def sets_the_storage_of_its_input(_: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    x.set_(y)
    return x + 1


@case(x, recorded=True)
def transposes_its_own_result_in_place(_: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.t_()
    y.unsqueeze_(0)
    return y


@case(x)
def transposes_its_input_in_place(_: Any, x: torch.Tensor) -> torch.Tensor:
    x.t_()
    return x * 2


@case(lambda d: {"x": [d.floats(3), d.floats(3, salt=1)]}, recorded=True)
def writes_into_a_list_of_inputs(_: Any, x: list[torch.Tensor]) -> torch.Tensor:
    for t in x:
        t.add_(1)
    return x[0] - x[1]


@case(lambda d: {"x": [d.floats(3), d.floats(3, salt=1)]})
def appends_to_a_list_of_inputs(_: Any, x: list[torch.Tensor]) -> torch.Tensor:
    x.append(x[0] + x[1])
    return x[-1] * 2


@case(lambda d: {"batch": {"x": d.floats(3)}})
def adds_a_key_to_its_argument(_: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    batch["y"] = batch["x"] * 2
    return batch["y"] + 1


@case(lambda d: {"batch": {"x": d.floats(3), "drop": d.floats(2)}})
def takes_a_key_from_its_argument(_: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return batch.pop("drop").sum() + batch["x"]
