"""A module that is changed after `prepare` is noticed at the next call, whatever was changed."""

from __future__ import annotations

import argparse
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from nimble_jobs import Nimble
from nimble_jobs.engine import words
from nimble_jobs.errors import EngineError, UsageError
from nimble_jobs.nimble import facts
from nimble_jobs.nimble.facts import Facts


class Scale(nn.Module):
    factor = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Net(nn.Module):
    """One of everything that a module may be made of."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.0)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.scale = Scale()
        self.gain, self.steps = 1.0, 2
        self.sizes = [1, 2]
        self.shifts = [torch.zeros(4), torch.ones(4)]
        self.by_name = {"shift": torch.ones(4), "inner": [3]}
        self.marks = {1, 2}
        self.config = argparse.Namespace(gain=1.0, names=["a"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.scale(self.drop(self.norm(self.tied(self.first(x))))) * self.gain
        for shift in self.shifts:
            y = y + shift
        return y * self.sizes[0] * self.config.gain + self.by_name["shift"]


def _set(path: str, value: Any) -> Callable[[Net], None]:
    def change(net: Net) -> None:
        owner, _, name = path.rpartition(".")
        setattr(net.get_submodule(owner), name, value)

    return change


def _later(change: Callable[[Net], object]) -> Callable[[Net], None]:
    return lambda net: (change(net), None)[1]


CHANGES: dict[str, tuple[Callable[[Net], None], str]] = {
    "submodule replaced": (lambda n: setattr(n, "scale", Scale()), "'scale' was replaced"),
    "submodule added": (lambda n: n.add_module("extra", nn.Identity()), "'extra' was added"),
    "submodule removed": (lambda n: delattr(n, "drop"), "'drop' was removed"),
    "class of a submodule": (lambda n: setattr(n.scale, "__class__", nn.Identity), "'scale' was changed: its class"),
    "parameter replaced": (
        lambda n: setattr(n.first, "bias", nn.Parameter(torch.ones(4))),
        "'first.bias' was replaced",
    ),
    "second name of a tied weight": (
        lambda n: setattr(n.tied, "weight", nn.Parameter(torch.ones(4, 4))),
        "'tied.weight' was replaced",
    ),
    "parameter taken away": (lambda n: n.first.register_parameter("bias", None), "'first.bias' was"),
    "parameter added": (lambda n: n.drop.register_parameter("w", nn.Parameter(torch.ones(1))), "'drop.w' was added"),
    "buffer replaced": (lambda n: setattr(n.norm, "running_mean", torch.ones(4)), "'norm.running_mean' was replaced"),
    "buffer added": (lambda n: n.drop.register_buffer("b", torch.ones(1)), "'drop.b' was added"),
    "data of a parameter": (lambda n: setattr(n.first.bias, "data", torch.ones(4)), "'first.bias' was moved"),
    "storage of a buffer": (
        lambda n: _later(lambda _: n.norm.running_var.set_(torch.ones(4)))(n),
        "'norm.running_var' was moved",
    ),
    "strides over the same bytes": (
        lambda n: setattr(n.first.weight, "data", n.first.weight.data.t()),
        "'first.weight' was changed: its strides was (4, 1), and is (1, 4)",
    ),
    "type over the same bytes": (
        lambda n: setattr(n.norm.running_mean, "data", n.norm.running_mean.data.view(torch.int32)),
        "'norm.running_mean' was changed: its dtype",
    ),
    "all weights cast": (_later(lambda n: n.double()), "was changed: its dtype was torch.float32"),
    "grown storage": (
        lambda n: _later(lambda _: n.norm.running_mean.untyped_storage().resize_(1 << 20))(n),
        "'norm.running_mean' was moved",
    ),
    "tensor in a list": (lambda n: n.shifts.__setitem__(0, torch.ones(4)), "'shifts.0' was replaced"),
    "list that grows": (lambda n: n.shifts.append(torch.ones(4)), "'shifts' was changed: its length was 2, and is 3"),
    "number in a list": (lambda n: n.sizes.__setitem__(0, 3), "'sizes.0' was 1, and is 3"),
    "tensor in a dict": (lambda n: n.by_name.__setitem__("shift", torch.zeros(4)), "'by_name.shift' was replaced"),
    "list in a dict": (lambda n: n.by_name["inner"].append(4), "'by_name.inner' was changed: its length"),
    "set": (lambda n: n.marks.add(3), "'marks' was changed: its length"),
    "configuration": (_set("config", None), "'config' was"),
    "value of a configuration": (lambda n: setattr(n.config, "gain", 2.0), "'config.gain' was 1.0, and is 2.0"),
    "list of a configuration": (lambda n: n.config.names.append("b"), "'config.names' was changed: its length"),
    "eps": (_set("norm.eps", 0.5), "'norm.eps' was 1e-05, and is 0.5"),
    "p": (_set("drop.p", 0.5), "'drop.p' was 0.0, and is 0.5"),
    "float": (_set("gain", 3.0), "'gain' was 1.0, and is 3.0"),
    "int": (_set("steps", 3), "'steps' was 2, and is 3"),
    "another kind of number": (_set("steps", 2.0), "'steps' was 2, and is 2.0"),
    "attribute added": (_set("fresh", 3), "'fresh' was added"),
    "forward of an instance": (_set("scale.forward", lambda x: x), "'scale.forward' was added"),
    "forward hook": (_later(lambda n: n.first.register_forward_hook(lambda *_: None)), "'first._forward_hooks."),
    "forward pre-hook": (
        _later(lambda n: n.drop.register_forward_pre_hook(lambda *_: None)),
        "'drop._forward_pre_hooks.",
    ),
}
WHEN_TRAINING: dict[str, tuple[Callable[[Net], None], str]] = {
    "training flag": (_later(lambda n: n.norm.eval()), "'norm.training' was True, and is False"),
    "frozen": (_later(lambda n: n.first.weight.requires_grad_(False)), "'first.weight' was changed: its requires_grad"),
    "backward hook": (
        _later(lambda n: n.first.register_full_backward_hook(lambda *_: None)),
        "'first._backward_hooks.",
    ),
}


def prepared(net: nn.Module, **options: Any) -> Nimble:
    nimble = Nimble(net)
    nimble.prepare(torch.ones(2, 4), **options)
    return nimble


@pytest.fixture(params=["words", "everything"])
def looking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to look: words of memory first, and where none are known, everything at each call."""
    if request.param == "everything":
        monkeypatch.setattr(facts, "layout", lambda: None)
    else:
        assert words.layout() is not None


@pytest.mark.usefixtures("looking")
@pytest.mark.parametrize("training", [False, True])
def test_every_change_is_noticed_by_name(training: bool) -> None:
    """Whatever is changed, the next look says what, by its dotted name; before that nothing is reported."""
    changes = {**CHANGES, **(WHEN_TRAINING if training else {})}
    for what, (change, says) in changes.items():
        net = Net()
        before = Facts.of(net, training=training)
        assert before.difference(Facts.of(net, training=training)) is None, what
        assert before.untouched() is (before._words is not None), what
        change(net)
        assert not before.untouched(), what
        assert says in (before.difference(Facts.of(net, training=training)) or ""), what


@pytest.mark.usefixtures("looking")
@pytest.mark.parametrize(
    "what", ["float", "tensor in a list", "second name of a tied weight", "forward of an instance"]
)
@pytest.mark.parametrize("training", [False, True])
def test_a_call_after_a_change_raises_and_another_prepare_mends_it(what: str, training: bool) -> None:
    """The call says what was changed and what to do; after another `prepare` the outputs are the changed module's."""
    net, x = Net().train(training), torch.randn(2, 4)
    nimble = prepared(net, training=training)
    nimble(x)
    change, says = CHANGES[what]
    change(net)
    for _ in range(2):
        with pytest.raises(EngineError, match=rf"changed after it was prepared.*{re.escape(says)}.*; prepare again$"):
            nimble(x)
    nimble.prepare(x, training=training)
    torch.testing.assert_close(nimble(x), net(x))


@pytest.mark.parametrize("what", sorted(WHEN_TRAINING))
def test_what_only_matters_to_training_is_refused_there_and_ignored_in_evaluation(what: str) -> None:
    """Training flags, `requires_grad` and backward hooks end a training's schedule; evaluation goes on, since it is
    prepared in evaluation mode whatever mode the module is in.
    """
    net, x = Net(), torch.randn(2, 4)
    nimble = prepared(net, training=True)
    evaluated = prepared(net)
    expected = evaluated(x)
    WHEN_TRAINING[what][0](net)
    with pytest.raises(EngineError, match="changed after it was prepared"):
        nimble(x)
    torch.testing.assert_close(evaluated(x), expected)


def test_a_class_that_is_changed_is_noticed() -> None:
    """A method or a plain attribute of a submodule's class counts as the module's own."""
    net, x = Net().eval(), torch.randn(2, 4)
    nimble = prepared(net)
    try:
        Scale.factor = 3.0
        with pytest.raises(EngineError, match=r"Scale\.factor' was 2\.0, and is 3\.0"):
            nimble(x)
    finally:
        Scale.factor = 2.0
    torch.testing.assert_close(nimble(x), net(x))


def test_hooks_of_all_modules_and_hooks_that_are_removed_are_noticed() -> None:
    """A hook that every module calls counts, and so does taking a hook away that was there when it was prepared."""
    net, x = Net().eval(), torch.randn(2, 4)
    own = net.first.register_forward_hook(lambda _m, _a, y: 2 * y)
    nimble = prepared(net)
    everywhere = register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(EngineError, match="_global_forward_hooks"):
            nimble(x)
    finally:
        everywhere.remove()
    torch.testing.assert_close(nimble(x), net(x))
    own.remove()
    with pytest.raises(EngineError, match=r"'first\._forward_hooks\.\d+' was removed"):
        nimble(x)


def test_what_is_put_back_and_what_changes_in_place_is_no_change() -> None:
    """An attribute that is set and reset, `train()` and `eval()`, and weights updated in place all go on replaying."""
    net, x = Net().eval(), torch.randn(2, 4)
    nimble = prepared(net)
    net.gain = 5.0
    net.gain = 1.0
    net.train()
    net.eval()
    with torch.no_grad():
        net.first.weight.add_(1)
    net.load_state_dict(Net().state_dict())
    torch.testing.assert_close(nimble(x), net(x))
    assert nimble.fallback is None


class Counting(nn.Module):
    """Notes on itself what no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(4, 4), {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen[tuple(x.shape)] = True
        return self.linear(x)


def test_what_the_modules_own_calls_change_may_go_on_changing() -> None:
    """A module that notes shapes is also called in eager, between replays, without ending its schedule."""
    net, x = Counting().eval(), torch.randn(2, 4)
    nimble = prepared(net)
    net(x)
    net(torch.ones(3, 4))
    torch.testing.assert_close(nimble(x), net(x))
    net.linear.bias = None
    with pytest.raises(EngineError, match=r"'linear\.bias' was"):
        nimble(x)


def test_with_fallback_a_changed_module_runs_in_eager_and_says_why() -> None:
    """With `fallback` the call answers as the changed module does, and so do all later ones."""
    net, x = Net().eval(), torch.randn(2, 4)
    nimble = prepared(net, fallback=True)
    assert nimble.fallback is None
    net.gain = 7.0
    for _ in range(2):
        torch.testing.assert_close(nimble(x), net(x).detach())
        assert nimble.fallback is not None
        assert "'gain' was 1.0, and is 7.0" in nimble.fallback
        assert nimble.schedule is None
    nimble.prepare(x)
    assert nimble.fallback is None
    torch.testing.assert_close(nimble(x), net(x).detach())


def test_a_change_is_noticed_before_a_replay_writes_state() -> None:
    """Statistics do not move in a call that is refused, nor twice in one that falls back to eager."""
    for fallback in (False, True):
        net, x = Net(), torch.randn(2, 4)
        nimble = prepared(net, training=True, fallback=fallback)
        nimble(x)
        net.gain = 2.0
        before = net.norm.num_batches_tracked.clone()
        if fallback:
            nimble(x)
        else:
            with pytest.raises(EngineError, match="'gain' was"):
                nimble(x)
        assert net.norm.num_batches_tracked == before + int(fallback)


def test_guard_off_looks_at_nothing() -> None:
    """Without the guard a replay repeats what was prepared; other words than on and off are refused."""
    net, x = Net().eval(), torch.randn(2, 4)
    nimble = prepared(net, guard="off")
    expected = nimble(x)
    net.gain = 7.0
    torch.testing.assert_close(nimble(x), expected)
    with pytest.raises(UsageError, match=r"^guard: found 'no'; expected 'on' or 'off'$"):
        nimble.prepare(x, guard="no")  # type: ignore[arg-type]


def test_calls_wait_while_another_signature_is_prepared() -> None:
    """A call made while another thread prepares sees the module as it was before or after, never in between."""
    net = Net()
    nimble = prepared(net)
    x, problems = torch.randn(2, 4), []
    expected, done = nimble(x), threading.Event()

    def call() -> None:
        try:
            while not done.is_set():
                torch.testing.assert_close(nimble(x), expected)
        except BaseException as e:  # noqa: BLE001 - shown below
            problems.append(e)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for batch in (3, 5):
        nimble.prepare(torch.ones(batch, 4))
    done.set()
    for thread in threads:
        thread.join()
    assert problems == []
    assert all(m.training for m in net.modules())
