"""Small modules made of steps in any order: arithmetic, views, writes, state, host reads, chance, output structures."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from tests.hazards.case import Apply, Case, Data


@dataclass
class Place:
    """What a step may use: the module, its input, and views that earlier steps took."""

    m: Any
    given: torch.Tensor
    views: list[torch.Tensor] = field(default_factory=list)


Step = Callable[[Place, torch.Tensor], torch.Tensor]


def then(change: Callable[[Place, torch.Tensor], object], result: Step = lambda _p, x: x) -> Step:
    """A step for its side effect."""

    def step(p: Place, x: torch.Tensor) -> torch.Tensor:
        change(p, x)
        return result(p, x)

    return step


def counted(p: Place, x: torch.Tensor) -> torch.Tensor:
    p.m.k += 1
    return x * p.m.k


def replaced(p: Place, x: torch.Tensor) -> torch.Tensor:
    p.m.b = p.m.b + x.tanh()
    return x + p.m.b


def rows_above(p: Place, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([row if float(row.sum()) > 0 else -row for row in x])


# Each takes and gives 3 x 4 numbers.
STEPS: dict[str, Step] = {
    "relu": lambda _p, x: x.relu(),
    "softmax": lambda _p, x: x.softmax(-1),
    "linear": lambda p, x: p.m.linear(x),
    "norm": lambda p, x: p.m.norm(x),
    "weight": lambda p, x: x * p.m.w,
    "cumsum": lambda _p, x: x.cumsum(0),
    "where": lambda _p, x: torch.where(x > 0, x, x * 0.1),
    "sorted": lambda _p, x: x.sort(-1).values,
    "transposed": lambda _p, x: x.t().contiguous().view(4, 3).t(),
    "strided": lambda _p, x: torch.stack([x, -x], -1)[..., 0],
    "expanded": lambda _p, x: x[:1].expand(3, 4) + 0 * x,
    "cloned": lambda _p, x: x.clone(),
    "given": lambda p, x: x + p.given,
    "given itself": lambda p, _x: p.given,
    "row": then(lambda p, x: p.views.append(x[1])),
    "row of the state": then(lambda p, _x: p.views.append(p.m.b[2])),
    "row of the input": then(lambda p, _x: p.views.append(p.given[0])),
    "views read": lambda p, x: x + sum(p.views) if p.views else x,
    "views written": then(lambda p, _x: [v.add_(1) for v in p.views]),
    "written in place": lambda _p, x: x.mul_(0.5),
    "part written": then(lambda _p, x: x[:, 1:3].fill_(2)),
    "input written": then(lambda p, _x: p.given.add_(1)),
    "data written": then(lambda _p, x: x.data[0].zero_()),
    "state read": lambda p, x: x + p.m.b,
    "state written": then(lambda p, x: p.m.b.copy_(x.tanh())),
    "state advanced": then(lambda p, x: p.m.b.mul_(0.9).add_(x.tanh()), lambda p, x: x - p.m.b),
    "state by out=": then(lambda p, x: torch.tanh(x, out=p.m.b)),
    "state replaced": replaced,
    "state returned": lambda p, _x: p.m.b,
    "counter": then(lambda p, _x: p.m.n.add_(1), lambda p, x: x * p.m.n),
    "counted in Python": counted,
    "counted for nobody": then(lambda p, _x: setattr(p.m, "k", p.m.k + 1)),
    "kept": then(lambda p, x: p.m.kept.__setitem__(slice(None), [x.clone()]), lambda p, x: x + p.m.kept[0]),
    "kept from before": lambda p, x: x + (p.m.kept[0] if p.m.kept else 0),
    "parameter written": then(lambda p, _x: p.m.w.data.mul_(0.9)),
    "read": lambda _p, x: x * float(x.mean()),
    "read as a list": lambda _p, x: x * x.tolist()[0][0],
    "read as an array": lambda _p, x: x + float(x.cpu().numpy().max()),
    "branch": lambda _p, x: x * 2 if x.sum() > 0 else x,
    "branch of rows": rows_above,
    "branch on the state": lambda p, x: x * 2 if p.m.n > 2 else x,
    "shape": lambda _p, x: x * x.shape[0] + x.dim(),
    "noise": lambda _p, x: x + torch.rand_like(x),
    "noise of Python": lambda _p, x: x * (2 if random.random() < 0.3 else 1),
    "double": lambda _p, x: (x.double() * 2).float(),
    "mask": lambda _p, x: x.masked_fill(x > x.mean(), 0.0),
    "index": lambda _p, x: x[torch.tensor([2, 0, 1], device=x.device)],
    "selected": lambda _p, x: x - x[x > 0].sum(),
}

FORMS: dict[str, Callable[[Place, torch.Tensor], Any]] = {
    "tensor": lambda _p, x: x,
    "pair": lambda p, x: (x, p.m.b),
    "views": lambda _p, x: [x, x[1], x.t()],
    "dict": lambda _p, x: {"y": x, "none": None, "n": 3, "name": "some"},
    "nested": lambda p, x: {"b": [x + 1, (x.sum(), {"given": p.given})]},
    "number": lambda _p, x: (x, float(x.sum())),
    "label": lambda _p, x: {"y": x, "label": int(x.argmax())},
    "count": lambda p, x: (x, p.m.k),
    "as many": lambda p, x: [x] * (1 + int(p.m.n) % 3),
}

LAYOUTS: dict[str, Callable[[Data], torch.Tensor]] = {
    "dense": lambda d: d.floats(3, 4),
    "transposed": lambda d: d.floats(4, 3).t(),
    "strided": lambda d: d.floats(6, 8)[::2, ::2],
    "offset": lambda d: d.floats(5, 4)[2:],
    "either": lambda d: d.floats(3, 4) if d.turn < 3 else d.floats(4, 3).t(),
}


def own() -> dict[str, Any]:
    torch.manual_seed(1)
    return {
        "b": torch.linspace(-1, 1, 12).view(3, 4),
        "n": torch.zeros(()),
        "w": nn.Parameter(torch.linspace(0.5, 1.5, 4)),
        "linear": nn.Linear(4, 4),
        "norm": nn.BatchNorm1d(4),
        "k": 0,
        "kept": [],
    }


def case_of(steps: tuple[str, ...], form: str, layout: str) -> Case:
    """The module that does these steps in turn."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        place, y = Place(m, x), x
        for step in steps:
            y = STEPS[step](place, y)
        return FORMS[form](place, y)

    return Case(
        name=f"{' > '.join(steps)} > {form} of {layout}",
        make=lambda: Apply(forward, own()),
        call=lambda data: ((LAYOUTS[layout](data),), {}),
        recorded=None,
        between=lambda _m, _turn: None,
        outside=lambda _m: None,
        misuse=True,  # a layout that the example did not have
        advanced=False,
        strides=layout != "either",
        attributes=False,
    )


def cases() -> st.SearchStrategy[Case]:
    """Any steps, form and layout."""
    return st.builds(
        case_of,
        st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=5).map(tuple),
        st.sampled_from(sorted(FORMS)),
        st.sampled_from(sorted(LAYOUTS)),
    )
