"""Which way forward goes: by data, by shape, by constants, by mode, by errors."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import nn

from tests.hazards.case import Case, Cases, Data

CASES: list[Case] = []
case = Cases("flow", CASES)


def x(data: Data) -> torch.Tensor:
    return data.floats(3, 4)


@case(x)
def cond_by_data(_: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (x,))


@case(x)
def while_loop_by_data(_: Any, x: torch.Tensor) -> torch.Tensor:
    from torch._higher_order_ops.while_loop import while_loop

    return while_loop(lambda t: t.norm() > 1, lambda t: (t / 2,), (x,))[0]


@case(x, recorded=True)
def where_by_data(_: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x.exp2(), x)


@case(x, recorded=True)
def loops_by_shape(_: Any, x: torch.Tensor) -> torch.Tensor:
    for _i in range(x.shape[0]):
        x = x + x.mean()
    return x


@case(lambda d: {"x": d.floats(3, 4), "deep": True}, recorded=True)
def by_a_constant(_: Any, x: torch.Tensor, deep: bool) -> torch.Tensor:
    return x.exp2() if deep else x


@case(lambda d: {"x": d.floats(3, 4), "scale": -0.0 if d.turn % 2 else 0.0}, misuse=True)
def by_the_sign_of_a_zero(_: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
    return x * math.copysign(1.0, scale)


@case(lambda d: {"x": d.floats(3, 4), "scale": float("nan")})
def by_a_nan(_: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
    return x if scale != scale else x * 2


@case(lambda d: {"x": d.floats(3, 4), "n": True if d.turn % 2 else 1}, misuse=True)
def by_the_type_of_a_constant(_: Any, x: torch.Tensor, n: Any) -> torch.Tensor:
    return x if n is True else x * 2


@case(lambda d: {"x": d.floats(3, 4), "names": ["b", "a"] if d.turn % 2 else ["a", "b"]}, misuse=True)
def by_the_order_of_a_list(_: Any, x: torch.Tensor, names: list[str]) -> torch.Tensor:
    return x if names[0] == "a" else x * 2


@case(lambda d: {"x": dict([("b", d.floats(3)), ("a", d.floats(3, salt=1))][:: 1 if d.turn % 2 else -1])}, misuse=True)
def by_the_order_of_a_dict(_: Any, x: dict[str, torch.Tensor]) -> torch.Tensor:
    first, second = x.values()
    return first - 2 * second


@case(
    lambda d: {"x": dict([("b", d.floats(3)), ("a", d.floats(3, salt=1))][:: 1 if d.turn % 2 else -1])}, recorded=True
)
def by_keys_of_a_dict_in_another_order(_: Any, x: dict[str, torch.Tensor]) -> torch.Tensor:
    return x["a"] - 2 * x["b"]


@case(lambda d: ((), dict([("a", d.floats(3)), ("b", d.floats(3, salt=1))][:: 1 if d.turn % 2 else -1])), recorded=True)
class KeywordArgumentsInAnotherOrder(nn.Module):
    def forward(self, *, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a - 2 * b


@case(lambda d: ((), dict([("a", d.floats(3)), ("b", d.floats(3, salt=1))][:: 1 if d.turn % 2 else -1])), misuse=True)
def by_the_order_of_keyword_arguments(_: Any, **given: torch.Tensor) -> torch.Tensor:
    first, second = given.values()
    return first - 2 * second


@case(lambda d: (d.floats(3), d.floats(3, salt=1)), recorded=True)
def any_number_of_arguments(_: Any, *given: torch.Tensor) -> torch.Tensor:
    return given[0] - 2 * given[1]


@case(x, recorded=True)
def default_arguments(_: Any, x: torch.Tensor, scale: float = 2.0, mask: torch.Tensor | None = None) -> torch.Tensor:
    return x * scale if mask is None else x


@case(x, advanced=True)
def a_mutable_default_argument(_: Any, x: torch.Tensor, seen: list[int] = []) -> torch.Tensor:  # noqa: B006
    seen.append(1)
    return x * (2 if len(seen) % 2 else 3)


@case(lambda d: (d.floats(3, 4), (i for i in (1.0, 2.0))), misuse=True)
def a_generator_as_argument(_: Any, x: torch.Tensor, scales: Any) -> torch.Tensor:
    return x * sum(scales)


@case(lambda d: (d.floats(3, 4), slice(0, 2 if d.turn else 3)), misuse=True)
def a_slice_as_argument(_: Any, x: torch.Tensor, part: slice) -> torch.Tensor:
    return x[part].sum(0)


@case(lambda d: (d.floats(3, 4), torch.float64), recorded=True)
def a_dtype_as_argument(_: Any, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype)


@case(lambda d: (d.floats(3, 4), x(d).size()))
def a_size_as_argument(_: Any, x: torch.Tensor, size: torch.Size) -> torch.Tensor:
    return x.reshape(size.numel())


@case(x)
def catches_an_error_by_data(_: Any, x: torch.Tensor) -> torch.Tensor:
    try:
        return torch.linalg.cholesky(x @ x.t() if x.sum() > 0 else -(x @ x.t()))
    except RuntimeError:
        return x


@case(x, recorded=True)
def catches_an_error_by_shape(_: Any, x: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(RuntimeError):
        return x @ x
    return x * 2


@case(x)
def raises_in_the_end(_: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y.view(-1)[0] if y.numel() < 0 else y


@case(x, recorded=True)
def by_grad_mode(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if torch.is_grad_enabled() else x * 3


@case(x)
def by_inference_mode(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if torch.is_inference_mode_enabled() else x * 3


@case(x)
def by_requires_grad(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.requires_grad else x * 3


@case(x, recorded=True)
def by_its_mode(m: Any, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(x, 0.5, m.training) * (2 if m.training else 3)


@case(x, lambda: {"on": True}, between=lambda m, turn: setattr(m, "on", turn < 3))
def by_an_attribute_that_changes(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if m.on else x * 3


@case(x, lambda: {"scales": [2.0]}, between=lambda m, turn: m.scales.__setitem__(0, float(turn)))
def by_a_list_that_changes(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x * m.scales[0]


@case(x, lambda: {"act": nn.ReLU()}, between=lambda m, turn: setattr(m, "act", nn.ReLU() if turn < 3 else nn.Tanh()))
def by_a_submodule_that_is_replaced(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.act(x)


@case(x, lambda: {"act": nn.LeakyReLU(0.1)}, between=lambda m, turn: setattr(m.act, "negative_slope", 0.1 * turn))
def by_a_submodules_number(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.act(x)


def hook_after_two(m: Any, turn: int) -> None:
    if turn == 3:
        m.act.register_forward_hook(lambda _m, _a, y: y + 1)


@case(x, lambda: {"act": nn.ReLU()}, between=hook_after_two)
def by_a_hook_that_comes_later(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.act(x)


@case(x, lambda: {"linear": nn.Linear(4, 4)}, between=lambda m, _: m.linear.weight.data.mul_(1.5))
def weights_that_change_in_place(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x)


def other_weight(m: Any, turn: int) -> None:
    if turn == 3:
        m.linear.weight = nn.Parameter(torch.full_like(m.linear.weight, 0.5))


@case(x, lambda: {"linear": nn.Linear(4, 4)}, between=other_weight)
def a_weight_that_is_replaced(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x)


def other_data(m: Any, turn: int) -> None:
    if turn == 3:
        m.linear.weight.data = torch.full_like(m.linear.weight, 0.5)


@case(x, lambda: {"linear": nn.Linear(4, 4)}, between=other_data)
def a_weight_whose_data_is_replaced(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x)


def transposed_weight(m: Any, turn: int) -> None:
    if turn == 3:
        m.linear.weight.data = m.linear.weight.data.t()


@case(x, lambda: {"linear": nn.Linear(4, 4)}, between=transposed_weight)
def a_weight_that_is_transposed_in_its_place(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x)


@case(
    x,
    lambda: {"drop": nn.Dropout(0.5)},
    between=lambda m, turn: setattr(m.drop, "p", 0.1 * turn),
    recorded=None,
)
def a_dropout_that_is_off(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.drop(x) * 2


@case(x, lambda: {"norm": nn.BatchNorm1d(4)}, between=lambda m, turn: setattr(m.norm, "eps", 10.0**-turn))
def an_epsilon_that_changes(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.norm(x)


@case(
    x,
    lambda: {"act": nn.ReLU()},
    between=lambda m, turn: m.act.__setattr__("forward", torch.tanh) if turn == 3 else None,
)
def a_forward_that_is_replaced(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.act(x)


@case(
    x,
    lambda: {"layers": nn.ModuleList([nn.ReLU()])},
    between=lambda m, turn: m.layers.append(nn.Tanh()) if turn == 3 else None,
)
def a_list_of_layers_that_grows(m: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in m.layers:
        x = layer(x)
    return x


@case(
    x, lambda: {"w": nn.ParameterList([nn.Parameter(torch.ones(4))])}, between=lambda m, turn: m.w[0].data.fill_(turn)
)
def a_parameter_list(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x * m.w[0]


def retied(m: Any, turn: int) -> None:
    if turn == 3:
        m.out.weight = nn.Parameter(m.out.weight.detach().clone() * 2)


@case(lambda d: d.ints(4, 2, 3), between=retied)
class TiedWeights(nn.Module):
    """One weight under two names, of which one gets another later."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(4, 4), nn.Linear(4, 4)
        self.out.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.words(ids))


def frozen_device(m: Any, turn: int) -> None:
    if turn == 3:
        m.double()


@case(x, lambda: {"linear": nn.Linear(4, 4)}, between=frozen_device)
def a_module_that_is_cast(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x.to(m.linear.weight.dtype))


@case(lambda d: d.floats(3, 4).requires_grad_(d.turn > 2))
def an_input_that_requires_grad_later(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2


@case(lambda d: d.floats(3 if d.turn < 3 else 5, 4), misuse=True)
def another_shape_later(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2


@case(lambda d: d.floats(3, 4, dtype=torch.float32 if d.turn < 3 else torch.float64), misuse=True)
def another_dtype_later(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2


@case(lambda d: {"x": {1: d.floats(3), "1": d.floats(3, salt=1)}})
def keys_of_two_types_with_the_same_name(_: Any, x: dict[Any, torch.Tensor]) -> torch.Tensor:
    return x[1] - 2 * x["1"]


@case(lambda d: {"x": {"a.b": d.floats(3), "a": {"b": d.floats(3, salt=1)}}})
def keys_whose_dotted_names_collide(_: Any, x: dict[str, Any]) -> torch.Tensor:
    return x["a.b"] - 2 * x["a"]["b"]


@case(lambda d: ((d.floats(3),), {"args": d.floats(3, salt=1), "kwargs": d.floats(3, salt=2)}), recorded=True)
def arguments_named_args_and_kwargs(_: Any, x: torch.Tensor, args: torch.Tensor, kwargs: torch.Tensor) -> torch.Tensor:
    return x - 2 * args + 3 * kwargs


@case(
    x,
    lambda: {"args": nn.ParameterList([nn.Parameter(torch.full((4,), 3.0))]), "output": nn.Parameter(torch.ones(4))},
    recorded=True,
)
def parameters_named_args_and_output(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x * m.args[0] + m.output
