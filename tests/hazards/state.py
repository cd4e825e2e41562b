"""What a module keeps from call to call: buffers, parameters, Python attributes, and what lies outside of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.hazards.case import Case, Cases, Data, maker

CASES: list[Case] = []
case = Cases("state", CASES)


def x(data: Data) -> torch.Tensor:
    return data.floats(3, 4)


def counter() -> dict[str, Any]:
    return {"n": torch.zeros(())}


def whole_counter() -> dict[str, Any]:
    return {"n": torch.zeros((), dtype=torch.int64)}


@case(x, counter, recorded=True)
def counts_in_a_buffer(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.n += 1
    return x * m.n


@case(x, whole_counter, recorded=True)
def counts_after_its_use(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * m.n
    m.n.add_(1)
    return y


@case(x, counter)
def replaces_its_buffer(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.n = m.n + 1
    return x * m.n


@case(x, counter)
def replaces_through_data(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.n.data = m.n.data + x.mean()
    return x * m.n


@case(x, counter, recorded=True)
def copies_into_data(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.n.data.copy_(0.9 * m.n.data + x.mean())
    return x * m.n


@case(x, lambda: {"mean": torch.zeros(4), "n": torch.zeros(())}, recorded=True)
def moving_average(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.mean.mul_(0.9).add_(0.1 * x.mean(0))
    m.n.add_(1)
    return x - m.mean / (1 - 0.9**m.n)


@case(lambda d: d.floats(2, 1, 4), lambda: {"cache": torch.zeros(2, 8, 4), "at": torch.zeros(1, dtype=torch.int64)})
def cache_with_a_position_in_a_tensor(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.cache.index_copy_(1, m.at, x)
    m.at.add_(1)
    return m.cache.softmax(-1)


@case(lambda d: d.floats(2, 1, 4), lambda: {"cache": torch.zeros(2, 8, 4), "at": 0})
def cache_with_a_position_in_python(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.cache[:, m.at] = x[:, 0]
    m.at += 1
    return m.cache.cumsum(1)


@case(x, lambda: {"seen": []})
def a_list_that_grows(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.seen.append(1)
    return x * len(m.seen)


@case(x, lambda: {"seen": []})
def keeps_the_last_output(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = x + sum(m.seen)
    m.seen[:] = [y.clone()]
    return y


@case(x, lambda: {"last": None})
def differs_from_the_last_call(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = x if m.last is None else x - m.last
    m.last = x.clone()
    return y


@case(x, lambda: {"last": torch.zeros(3, 4)}, recorded=True)
def differs_from_the_last_call_in_a_buffer(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = x - m.last
    m.last.copy_(x)
    return y


@case(x, attributes=False)
def an_attribute_made_by_the_first_call(m: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(m, "scale"):
        m.scale = float(x.shape[0])
    return x * m.scale


@case(x)
def a_tensor_made_by_the_first_call(m: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(m, "scale"):
        m.scale = x.mean()
    return x * m.scale


@case(x, attributes=False)
def a_table_made_by_the_first_call(m: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(m, "table"):
        m.table = torch.arange(4, device=x.device).float().sin()
    return x * m.table


@case(x, lambda: {"cached": {}}, attributes=False)
def a_table_by_shape_in_a_dict(m: Any, x: torch.Tensor) -> torch.Tensor:
    if x.shape not in m.cached:
        m.cached[x.shape] = torch.ones(x.shape, device=x.device).tril()
    return x * m.cached[x.shape]


@case(x, lambda: {"n": 0})
def counts_in_python(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.n += 1
    return x * m.n


@case(x, lambda: {"n": 0})
def anneals_after_three_calls(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.n += 1
    return x * (0.5 if m.n > 3 else 1.0)


@case(x, lambda: {"n": 0}, attributes=False)
def counts_what_nobody_reads(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.n += 1
    return x * 2


@case(x, lambda: {"names": set()})
def a_set_that_grows(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.names.add(len(m.names))
    return x + len(m.names)


@case(x, lambda: {"own": SimpleNamespace(n=0)})
def counts_in_an_object(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.own.n += 1
    return x * m.own.n


@case(x, lambda: {"own": SimpleNamespace(t=torch.ones(4))})
def a_tensor_in_an_object(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.own.t = m.own.t.to(x.device)
    return x * m.own.t


@case(x, lambda: {"own": SimpleNamespace(t=torch.ones(4))}, outside=lambda m: m.own.t)
def writes_a_tensor_in_an_object(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.own.t = m.own.t.to(x.device)
    m.own.t.add_(x.mean(0))
    return x * m.own.t


@case(x, lambda: {"own": [torch.ones(4)]})
def writes_a_tensor_in_a_list(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.own[0] = m.own[0].to(x.device)
    m.own[0].add_(x.mean(0))
    return x * m.own[0]


@case(x, lambda: {"own": {"t": [torch.ones(4)]}})
def replaces_a_tensor_in_nested_containers(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.own["t"][0] = m.own["t"][0].to(x.device) + x.mean(0)
    return x * m.own["t"][0]


@case(x, lambda: {"w": nn.Parameter(torch.ones(4))}, recorded=True)
def writes_a_parameter(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.w.add_(1)
    return x * m.w


@case(x, lambda: {"w": nn.Parameter(torch.ones(4))})
def replaces_a_parameters_data(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.w.data = m.w.data + x.mean(0)
    return x * m.w


@case(x, lambda: {"w": nn.Parameter(torch.ones(4))})
def replaces_a_parameter(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.w = nn.Parameter(m.w.detach() * 2)
    return x * m.w


@case(lambda d: d.ints(9, 2, 3))
class RenormalisesRows(nn.Module):
    """An embedding with `max_norm` writes into the rows that it looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4, max_norm=0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.words(ids)


@case(lambda d: d.ints(9, 2, 3))
class RenormalisesRowsTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4, max_norm=0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.words.weight[:2].sum() + self.words(ids)


@case(x, recorded=True)
class NormalisesByItsBatch(nn.Module):
    """Batch normalisation that tracks nothing uses its batch also in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, track_running_stats=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


@case(x)
class NormalisesInTrainingMode(nn.Module):
    """Sets a child's mode in forward, so that evaluation advances its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.norm.train()
        y = self.norm(x)
        self.norm.eval()
        return y


@case(x)
class NormalisesWithoutMomentum(nn.Module):
    """A cumulative average reads its own count on the host, in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, momentum=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.norm.training = True
        y = self.norm(x)
        self.norm.training = False
        return y


@case(x)
class StaysInTrainingMode(nn.Module):
    """A call that leaves the mode changed."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.linear = nn.Dropout(0.5), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * (2 if self.training else 1)
        self.linear.train()
        return y * (3 if self.linear.training else 1)


@case(x)
@maker
def a_closure_over_a_tensor() -> nn.Module:
    scale = torch.full((4,), 2.0)

    class Closed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * scale.to(x.device)

    return Closed()


@case(x, outside=lambda m: m.kept(), advanced=True)
@maker
def a_closure_that_writes_a_tensor() -> nn.Module:
    scale = torch.full((4,), 2.0)

    class Closed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale.add_(1)
            return x * scale.to(x.device)

        def kept(self) -> torch.Tensor:
            return scale

    return Closed()


@case(x, outside=lambda m: m.kept(), advanced=True)
@maker
def a_closure_that_counts() -> nn.Module:
    calls = 0

    class Closed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return x * calls

        def kept(self) -> int:
            return calls

    return Closed()


@case(x, outside=lambda m: m.kept(), advanced=True)
@maker
def a_closure_that_keeps_a_tensor() -> nn.Module:
    kept: list[torch.Tensor] = []

    class Closed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + (kept[-1] if kept else 0)
            kept.append(x.clone())
            return y

        def kept(self) -> int:
            return len(kept)

    return Closed()


@case(x, advanced=True)
@maker
def a_generator_that_goes_on() -> nn.Module:
    class Generates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = iter(range(1, 1000000))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * next(self.scales)

    return Generates()


SCALE = torch.ones(4)


@case(x, recorded=True)
def a_global_tensor(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x * SCALE.to(x.device)


@case(x, between=lambda _m, _turn: SCALE.fill_(1))
def a_global_tensor_that_forward_writes(_: Any, x: torch.Tensor) -> torch.Tensor:
    SCALE.add_(1)
    return x * SCALE.to(x.device)


@case(x, lambda: {"a": torch.zeros(4), "b": torch.ones(4)}, recorded=True)
def swaps_two_buffers_by_value(m: Any, x: torch.Tensor) -> torch.Tensor:
    kept = m.a.clone()
    m.a.copy_(m.b)
    m.b.copy_(kept + x.mean(0))
    return x + m.a - m.b


@case(x, lambda: {"a": torch.zeros(4), "b": torch.ones(4)})
def swaps_two_buffers_by_name(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.a, m.b = m.b, m.a
    return x + m.a - 2 * m.b


@case(x, lambda: {"ring": torch.zeros(3, 3, 4)}, recorded=True)
def a_ring_of_frames(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.ring.copy_(torch.roll(m.ring, 1, 0))
    m.ring[0] = x
    return m.ring.mean(0)


@case(x, lambda: {"seen": torch.zeros(0, 4)})
def a_buffer_that_grows(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.seen = torch.cat([m.seen, x])
    return m.seen.mean(0)


@case(x, lambda: {"seen": torch.zeros(1)})
def a_buffer_resized_in_place(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.seen.resize_(4).copy_(x[0])
    return x + m.seen


@case(x, lambda: {"most": torch.full((4,), -1e9)}, recorded=True)
def the_maximum_so_far(m: Any, x: torch.Tensor) -> torch.Tensor:
    torch.maximum(m.most, x.amax(0), out=m.most)
    return m.most - x


@case(x, lambda: {"n": torch.zeros(()), "first": torch.zeros(4)}, recorded=True)
def takes_the_first_call_as_its_reference(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.first.copy_(torch.where(m.n == 0, x[0], m.first))
    m.n.add_(1)
    return x - m.first


@case(x, lambda: {"ready": torch.zeros((), dtype=torch.bool), "first": torch.zeros(4)})
def initialises_itself_on_the_host(m: Any, x: torch.Tensor) -> torch.Tensor:
    if not m.ready:
        m.first.copy_(x.std(0))
        m.ready.fill_(True)
    return x / (m.first.abs() + 1)


@case(x, lambda: {"names": {}}, attributes=False)
def remembers_shapes_by_name(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.names[f"call{len(m.names)}"] = tuple(x.shape)
    return x.exp2()


@case(x)
class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.linear = nn.LazyLinear(3)
        self.linear(torch.zeros(1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@case(lambda d: d.floats(2, 3, 4), recorded=True)
class LstmWithItsState(nn.Module):
    """Hidden state kept in buffers from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, batch_first=True)
        self.register_buffer("h", torch.zeros(1, 2, 5))
        self.register_buffer("c", torch.zeros(1, 2, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, (h, c) = self.lstm(x.tanh(), (self.h, self.c))
        self.h.copy_(h)
        self.c.copy_(c)
        return y


@case(x)
class TiedBuffers(nn.Module):
    """One tensor under two names, written through the second."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.ones(4))
        self.register_buffer("b", self.a)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.b.add_(1)
        return x * self.a


@case(x)
class OverlappingBuffers(nn.Module):
    """Two buffers over the same bytes, at other offsets."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.arange(6.0)
        self.register_buffer("a", whole[:4])
        self.register_buffer("b", whole[2:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.b.mul_(2)
        return x * self.a


@case(x)
class ForgetsItsBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * (1 if self.a is None else self.a + 1)
        self.a = None
        return y


@case(x)
class RegistersABuffer(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "a" not in self._buffers:
            self.register_buffer("a", x.mean(0))
        self.a += 1
        return x * self.a


@case(x)
class RegistersAModule(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "act"):
            self.act = nn.Softplus()
            return x
        return self.act(x)
