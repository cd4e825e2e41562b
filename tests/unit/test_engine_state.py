"""Walks over a module: in torch's order, and past what holds nothing without missing what it holds later."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nimble_jobs.engine.attributes import Attributes, attributes
from nimble_jobs.engine.contents import Contents, state_of, tensors_in
from nimble_jobs.engine.private.modules import walk
from nimble_jobs.engine.random_states import RandomStates
from nimble_jobs.engine.state import Snapshot

CPU = torch.device("cpu")


class Names(nn.Module):
    """Gives its parts names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(2, 2)

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Iterator[Any]:
        yield f"{prefix}!", self


class Table(OrderedDict[str, Any]):
    """With attributes, as any class."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.first = nn.ModuleList([shared, nn.ReLU(), shared])
        self.none = None
        self.register_module("nothing", None)
        self.names = Names()
        self.last = nn.ModuleDict({"a": nn.Identity(), "b": shared[0]})
        self.flag, self.count, self.rate, self.word = False, 0, 0.0, "a"
        self.table: dict[str, Any] = {}
        self.ordered: OrderedDict[str, Any] = OrderedDict()
        self.own = Table()
        self.items: list[Any] = []
        self.names_seen: set[str] = set()
        self.same = self.table


def test_modules_come_in_the_order_of_torch() -> None:
    """Those that are there twice once, those that are None not, and those with another way in that way."""
    net = Net()
    assert list(walk(net)) == list(net.named_modules())
    assert list(walk(net.names)) == list(net.names.named_modules())


CHANGES: dict[str, Callable[[Net], object]] = {
    "flag": lambda net: setattr(net, "flag", 0),  # equal, and another type
    "count": lambda net: setattr(net, "count", 1),
    "rate": lambda net: setattr(net, "rate", -0.0),  # equal, and other bits
    "word": lambda net: setattr(net, "word", "b"),
    "none": lambda net: setattr(net, "none", False),
    "table": lambda net: net.table.update(a=1),
    "ordered": lambda net: net.ordered.update(a=1),
    "own": lambda net: net.own.update(a=1),
    "items": lambda net: net.items.append(1),
    "set": lambda net: net.names_seen.add("a"),
    "another type": lambda net: setattr(net, "table", OrderedDict()),
    "no longer the same": lambda net: setattr(net, "same", {}),
    "gone": lambda net: delattr(net, "ordered"),
    "hook": lambda net: net.first[1].register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_held_nothing_is_seen_once_it_holds_something(change: Callable[[Net], object]) -> None:
    """And is put back to nothing."""
    net = Net()
    before, first, snapshot = attributes(net), seen(net), Snapshot(net)
    assert attributes(net) == before
    assert first.differing(seen(net)) is None
    change(net)
    assert attributes(net) != before
    assert first.differing(seen(net)) is not None
    assert first.by_name() == before  # as it was, whatever it holds now
    snapshot.put_back()
    assert attributes(net) == before
    assert first.differing(seen(net)) is None


@pytest.mark.parametrize(
    ("change", "name"),
    [
        pytest.param(lambda net: setattr(net, "word", "".join(["a"])), None, id="an equal value"),
        pytest.param(lambda net: setattr(net, "own", Table()), None, id="another empty table"),
        pytest.param(lambda net: setattr(net, "alone", pair()), None, id="an equal tuple"),
        pytest.param(lambda net: net.keeper.__setitem__(0, []), None, id="an equal list in a list"),
        pytest.param(lambda net: setattr(net, "pair", (1, 2)), "pair", id="a tuple of another type"),
        pytest.param(lambda net: setattr(net, "twice", pair()), "twice", id="a tuple that is no longer the same"),
        pytest.param(lambda net: net.keeper.__setitem__(1, {}), "keeper", id="a table that is no longer the same"),
        pytest.param(lambda net: net.keeper[0].append(1), "keeper", id="a list in a list"),
        pytest.param(lambda net: net.append(nn.ReLU()), "2.training", id="a new part"),
        pytest.param(lambda net: net.pop(0), "0.none", id="a part that is gone"),
        pytest.param(lambda net: vars(net).update(_modules=dict(net._modules)), None, id="a table of its own"),
    ],
)
def test_values_that_look_the_same_are_no_difference(change: Callable[[Any], object], name: str | None) -> None:
    """What is the same in two places must be so later, too."""
    net: Any = nn.Sequential(Net(), nn.Linear(2, 2))
    net.own, net.word, net.pair, net.alone = Table(), "a", pair(), pair()
    net.twice = net.pair
    net.table = {}
    net.keeper = [[], net.table]
    before, first = attributes(net), seen(net)
    change(net)
    assert first.differing(seen(net)) == name
    assert (attributes(net) == before) == (name is None)


def pair() -> tuple[float, ...]:
    """A tuple that is no other one."""
    return tuple(iter((1, 2.0)))


def seen(net: nn.Module) -> Attributes:
    """Its attributes as they are."""
    return Attributes(Contents(net))


def test_nan_equals_itself() -> None:
    net = Net()
    net.rate = float("nan")
    assert attributes(net) == attributes(net)


@pytest.mark.parametrize("table", ["ordered", "own"])
def test_tensors_are_found_in_attributes_of_empty_tables(table: str) -> None:
    net = Net()
    snapshot = Snapshot(net)
    getattr(net, table).kept = torch.zeros(2)
    assert tensors_in(net).keys() - state_of(net).keys() == {f"{table}.kept"}
    snapshot.put_back()
    assert tensors_in(net).keys() == state_of(net).keys()


def test_numbers_of_numpy_that_were_drawn_are_noticed() -> None:
    states = RandomStates(CPU)
    assert states.changed() is None
    np.random.standard_normal()
    assert states.changed() == "numpy.random"
    states.put_back()
    assert states.changed() is None
    random.random()
    assert states.changed() == "Python's random module"
    states.put_back()
