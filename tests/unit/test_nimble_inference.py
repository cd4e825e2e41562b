"""`Nimble` on the CPU: structures, checks, several signatures, and what it must leave as it was."""

from __future__ import annotations

import copy
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import nn

import nimble_jobs
from nimble_jobs import Nimble
from nimble_jobs.engine import verify
from nimble_jobs.errors import CannotRecord, CheckFailed, EngineError, UsageError
from nimble_jobs.planner.module.restoring import restoring_state
from nimble_jobs.planner.sources.source import Source, Variants

Pair = namedtuple("Pair", ["left", "right"])


class Net(nn.Module):
    """Takes and returns what it is asked to."""

    def __init__(self, form: str = "tensor") -> None:
        super().__init__()
        self.form = form
        self.linear, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, *, scale: float = 1.0) -> Any:
        y = self.drop(self.norm(self.linear(x))) * scale
        if mask is not None:
            y = y.masked_fill(mask, 0.0)
        match self.form:
            case "tuple":
                return y, (y.sum(1), None, "done")
            case "dict":
                return OrderedDict(logits=y, rest={"mean": y.mean(), "n": 3})
            case "named":
                return Pair(y, [y + 1])
            case "same":
                return x, self.linear.bias, y
            case _:
                return y


def same(found: Any, expected: Any) -> None:
    """Fails unless both hold equal tensors in equal structures."""
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected.detach())
        return
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for name in expected:
            same(found[name], expected[name])
    elif isinstance(expected, tuple | list):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            same(a, b)
    else:
        assert found == expected


def eager(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        return copy.deepcopy(module).eval()(*args, **kwargs)


def prepared(module: nn.Module, example: Any, **options: Any) -> Nimble:
    nimble = Nimble(module)
    nimble.prepare(example, **options)
    return nimble


def test_it_is_exported_without_loading_torch_first() -> None:
    """`from nimble_jobs import Nimble` is the way in."""
    assert nimble_jobs.Nimble is Nimble


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict", "named", "same"])
def test_outputs_equal_eager_in_the_models_own_structure(form: str) -> None:
    """Tensors, tuples, dicts and named tuples come back as eager returns them, with constants in their places."""
    net = Net(form)
    nimble = prepared(net, torch.randn(5, 3))
    for _ in range(3):
        x = torch.randn(5, 3)
        same(nimble(x), eager(net, x))
    assert nimble.fallback is None
    assert nimble.schedule is not None
    assert nimble.schedule.program.tasks


MASK = torch.tensor([[True, False, False, False]])


@pytest.mark.parametrize(
    ("example", "args", "kwargs"),
    [
        ((torch.ones(2, 3), MASK), (torch.randn(2, 3), ~MASK), {}),
        ([torch.ones(2, 3)], (torch.randn(2, 3),), {}),
        ({"x": torch.ones(2, 3), "scale": 2.0}, (), {"scale": 2.0, "x": torch.randn(2, 3)}),
        (((torch.ones(2, 3),), {"mask": MASK, "scale": 0.5}), (torch.randn(2, 3),), {"scale": 0.5, "mask": ~MASK}),
        (((torch.ones(2, 3),), {"mask": None}), (torch.randn(2, 3),), {"mask": None}),
    ],
)
def test_examples_by_position_by_name_and_both(example: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """An example is a tensor, a tuple or list, a dict, or a pair; calls pass their arguments in the same way."""
    net = Net()
    same(prepared(net, example)(*args, **kwargs), eager(net, *args, **kwargs))


class Nested(nn.Module):
    def forward(self, batch: dict[str, Any], pairs: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
        image = batch["image"] * batch["gain"]
        return {"sum": image + sum(t * n for t, n in pairs)}


def test_nested_arguments_are_flattened_by_name() -> None:
    """Tensors inside of containers are inputs named by their path; plain values beside them are constants."""
    made = {"image": torch.randn(2), "gain": 3}, [(torch.randn(2), 1), (torch.randn(2), 2)]
    nimble = prepared(Nested(), made)
    assert list(nimble.inputs) == ["args.0.image", "args.1.0.0", "args.1.1.0"]
    fresh = {"image": torch.randn(2), "gain": 3}, [(torch.randn(2), 1), (torch.randn(2), 2)]
    same(nimble(*fresh), eager(Nested(), *fresh))
    with pytest.raises(UsageError, match=r"^args\.0\.gain: found the constant 4; expected the constant 3$"):
        nimble({"image": fresh[0]["image"], "gain": 4}, fresh[1])


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((torch.ones(4, 3),), {}, "args.0: found float32[4, 3] on cpu; expected float32[2, 3] on cpu"),
        (
            (torch.ones(2, 3).double(),),
            {},
            "args.0: found float64[2, 3] on cpu; expected float32[2, 3] on cpu",
        ),
        (
            (torch.ones(2, 3, device="meta"),),
            {},
            "args.0: found float32[2, 3] on meta; expected float32[2, 3] on cpu",
        ),
        (
            (torch.ones(2, 3), MASK),
            {},
            "args.1: found bool[1, 4] on cpu; expected no such argument",
        ),
        (
            (),
            {"x": torch.ones(2, 3)},
            "args.0: not given; expected float32[2, 3] on cpu; "
            "kwargs.x: found float32[2, 3] on cpu; expected no such argument",
        ),
        ((3,), {}, "args.0: found the constant 3; expected float32[2, 3] on cpu"),
        (([torch.ones(2, 3)],), {}, "args.0: not given; expected float32[2, 3] on cpu; "
         "args.0.0: found float32[2, 3] on cpu; expected no such argument"),
        (
            (torch.ones(2, 3).to_sparse(),),
            {},
            "args.0: found a Tensor of layout torch.sparse_coo; expected a dense tensor",
        ),
        ((object(),), {}, "args.0: found object; expected a tensor or a plain constant"),
    ],
)  # fmt: skip
def test_calls_that_do_not_fit_name_the_argument(args: tuple[Any, ...], kwargs: dict[str, Any], message: str) -> None:
    """Shapes, dtypes, devices, names, missing and extra arguments are told with what was found and expected."""
    nimble = prepared(Net(), torch.randn(2, 3))
    with pytest.raises(UsageError) as caught:
        nimble(*args, **kwargs)
    assert str(caught.value) == message
    nimble(torch.randn(2, 3))


def test_constants_differ_from_true_and_from_other_types() -> None:
    """1, 1.0 and True are three constants."""
    nimble = prepared(Net(), {"x": torch.ones(2, 3), "scale": 1})
    for other in (1.0, True):
        with pytest.raises(UsageError, match=r"^kwargs\.scale: found the constant"):
            nimble(x=torch.ones(2, 3), scale=other)


@pytest.mark.parametrize(
    ("module", "example", "options", "message"),
    [
        (Net(), 3, {}, "example: found int; expected a tensor"),
        (Net(), (), {}, "example: holds no tensor"),
        (Net(), {1: torch.ones(2)}, {}, "example: found dict"),
        (Net(), torch.ones(2, 3, device="meta"), {}, "args.0: found on meta; expected on cpu, like the module"),
        (Net(), torch.ones(2, 3), {"streams": 0}, "streams: found 0; expected 'auto' or a number of at least 1"),
        (Net(), torch.ones(2, 3), {"fuse": "on"}, "fuse: found 'on'; expected 'auto', 'off' or 'max'"),
        (Net(), torch.ones(2, 3), {"in_flight": True}, "in_flight: found True; expected a number"),
        (Net(), torch.ones(2, 3).to_sparse(), {}, "args.0: found a Tensor of layout torch.sparse_coo"),
    ],
)
def test_wrong_preparations_are_usage_errors(module: nn.Module, example: Any, options: Any, message: str) -> None:
    """What cannot be prepared is told before anything runs."""
    with pytest.raises(UsageError) as caught:
        prepared(module, example, **options)
    assert str(caught.value).startswith(message)


def test_only_modules_and_only_after_prepare() -> None:
    """A function is no module; a call before `prepare` says what is missing."""
    with pytest.raises(UsageError, match=r"^module: found function; expected a torch\.nn\.Module$"):
        Nimble(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"^nothing is prepared; call prepare first$"):
        Nimble(Net())(torch.ones(2, 3))


def test_outputs_are_the_callers_to_keep() -> None:
    """A later call changes no tensor that an earlier one returned, and inputs are not changed either."""
    net = Net("same")
    nimble = prepared(net, torch.randn(2, 3))
    x = torch.randn(2, 3)
    kept = nimble(x)
    before = [t.clone() for t in kept]
    for t in nimble(torch.randn(2, 3)):
        t.zero_()
    assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))
    assert float(net.linear.bias.detach().abs().sum()) > 0


def test_replay_works_on_the_static_tensors() -> None:
    """`replay` reads `inputs` and writes `outputs` without copies or checks."""
    net = Net("tuple")
    nimble = prepared(net, torch.randn(2, 3))
    x = torch.randn(2, 3)
    nimble.inputs["args.0"].copy_(x)
    nimble.replay()
    torch.testing.assert_close(nimble.outputs["output.1.0"], eager(net, x)[1][0])


def test_several_signatures_and_several_nimbles_side_by_side() -> None:
    """Each call goes to the schedule of its signature; a signature prepared again replaces the old one."""
    net, other = Net(), Net("dict")
    nimble, second = prepared(net, torch.randn(2, 3)), prepared(other, torch.randn(2, 3))
    nimble.prepare(torch.randn(7, 3))
    nimble.prepare({"x": torch.randn(2, 3)})
    nimble.prepare(torch.randn(2, 3))
    assert len(nimble.signatures) == 3
    for n in (2, 7, 2):
        x = torch.randn(n, 3)
        same(nimble(x), eager(net, x))
    x = torch.randn(2, 3)
    same(nimble(x=x), eager(net, x=x))
    same(second(x), eager(other, x))
    with pytest.raises(UsageError, match=r"\(3 signatures are prepared; this is the nearest\)$"):
        nimble(torch.randn(3, 3))
    nimble.release()
    with pytest.raises(UsageError, match="nothing is prepared"):
        nimble(x)
    same(second(x), eager(other, x))


def test_weights_changed_in_place_are_seen() -> None:
    """An optimizer's step and `load_state_dict` reach the next call."""
    net = Net()
    nimble = prepared(net, torch.randn(4, 3))
    x = torch.randn(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    net.train()(x).square().sum().backward()
    optimizer.step()
    same(nimble(x), eager(net, x))
    net.load_state_dict({n: torch.rand_like(t) if t.is_floating_point() else t for n, t in Net().state_dict().items()})
    same(nimble(x), eager(net, x))


@pytest.mark.parametrize("how", ["assign", "cast", "attribute"])
def test_weights_that_are_replaced_are_noticed(how: str) -> None:
    """A schedule never goes on silently with weights that the module no longer has."""
    net = Net()
    nimble = prepared(net, torch.randn(4, 3))
    match how:
        case "assign":
            net.load_state_dict({n: t.clone() for n, t in Net().state_dict().items()}, assign=True)
        case "cast":
            net.double()
        case "attribute":
            net.linear.bias = nn.Parameter(torch.zeros(4))
    with pytest.raises(EngineError, match=r"no longer fits: 'linear\.\w+' was (replaced|changed)"):
        nimble(torch.randn(4, 3))
    net.float()
    nimble.prepare(torch.randn(4, 3))
    x = torch.randn(4, 3)
    same(nimble(x), eager(net, x))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.kinds = nn.Embedding(50, 4), nn.Embedding(3, 4)

    def forward(self, ids: torch.Tensor, kinds: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        rows = self.words(ids) + self.kinds(kinds)
        return nn.functional.embedding_bag(ids.flatten(), self.words.weight, offsets).sum(0) + rows


def test_integers_of_any_range() -> None:
    """Integer inputs are checked with values like the example's: no index is overrun, sorted lists stay sorted."""
    net = Tokens()
    offsets = torch.tensor([0, 3, 5])
    nimble = prepared(net, (torch.randint(0, 50, (2, 4)), torch.full((2, 4), 2), offsets))
    given = torch.randint(0, 50, (2, 4)), torch.randint(0, 3, (2, 4)), torch.tensor([0, 1, 7])
    same(nimble(*given), eager(net, *given))


class WritesInput(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2.0) + 1


def test_a_model_that_writes_into_its_input_writes_into_the_callers() -> None:
    """In-place work on an input is seen by the caller, as in eager."""
    nimble = prepared(WritesInput(), torch.ones(3))
    x = torch.tensor([1.0, 2.0, 3.0])
    assert nimble(x).tolist() == [3.0, 5.0, 7.0]
    assert x.tolist() == [2.0, 4.0, 6.0]


class Sum(nn.Module):
    """May add to its first input before it takes the sum."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))
        self.writes = writes

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if self.writes:
            a.add_(1)
        return (a + b) * self.factor


@pytest.mark.parametrize("training", [False, True])
def test_inputs_that_share_memory_with_a_written_one_are_refused(training: bool) -> None:
    """What is written into one would have to appear in the other; parts that do not overlap may be given."""
    nimble = prepared(Sum(writes=True), (torch.zeros(3), torch.zeros(3)), training=training)
    whole = torch.zeros(6)
    for given in ((whole[:3], whole[:3]), (whole[:3], whole[2:5])):
        with pytest.raises(
            UsageError, match=r"^args\.0 and args\.1: share memory, and the model writes into args\.0; "
        ):
            nimble(*given)
    assert whole.tolist() == [0.0] * 6
    assert nimble(whole[:3], whole[3:]).tolist() == [1.0] * 3
    assert whole.tolist() == [1.0] * 3 + [0.0] * 3
    reads = prepared(Sum(writes=False), (torch.zeros(3), torch.zeros(3)), training=training)
    assert reads(whole[:3], whole[:3]).tolist() == [2.0] * 3


def test_gradients_are_not_lost_silently() -> None:
    """An input that requires grad is refused outside of `no_grad`."""
    nimble = prepared(Net(), torch.randn(2, 3))
    x = torch.randn(2, 3, requires_grad=True)
    with pytest.raises(UsageError, match=r"^args\.0: requires grad"):
        nimble(x)
    with torch.no_grad():
        assert not nimble(x).requires_grad
    with torch.inference_mode():
        nimble(torch.randn(2, 3))


def test_autocast_around_prepare_or_calls_is_refused() -> None:
    """Ambient autocast would become part of the schedule unseen, or be ignored by it."""
    nimble = prepared(Net(), torch.randn(2, 3))
    with torch.autocast("cpu"), pytest.raises(UsageError, match=r"^called under torch\.autocast"):
        nimble(torch.randn(2, 3))
    with torch.autocast("cpu"), pytest.raises(UsageError, match=r"under torch.autocast"):
        prepared(Net(), torch.randn(2, 3))


class Caches(nn.Module):
    """Counts, remembers, and may read the host."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.reads = reads
        self.shapes: list[torch.Size] = []
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape not in self.shapes:
            self.shapes.append(x.shape)
        self.count += 1
        self.last = x
        y = self.linear(x)
        return y * float(y.sum()) if self.reads else y


def test_several_in_flight_need_a_module_that_writes_no_state() -> None:
    """Replays at once over one buffer would overwrite each other's values; one at a time they may."""
    net = Caches(reads=False)
    with pytest.raises(
        UsageError, match=r"^in_flight: found 2; expected 1, because the module writes into its own 'count'$"
    ):
        prepared(net, torch.randn(2, 3), in_flight=2, fallback=True)
    assert float(net.count) == 0
    x = torch.randn(2, 3)
    for module, count in ((net, 1), (Net(), 2)):
        same(prepared(module, x, in_flight=count)(x), eager(module, x))


class GrowsOnce(nn.Module):
    """Its first call gives a buffer the shape that it then keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.register_buffer("sums", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if not self.sums.numel():
                self.sums.resize_(4).zero_()
            self.sums.add_(1e-6)
        found: torch.Tensor = self.linear(x) + self.sums
        return found


@pytest.mark.parametrize("training", [False, True])
def test_a_buffer_that_the_first_call_resizes_is_refused(training: bool) -> None:
    """Afterwards it has its own shape again, where a replay would write into memory that nobody sees."""
    net = GrowsOnce()
    with pytest.raises(CannotRecord, match="changes the shape of its tensor 'sums' in its first call"):
        Nimble(net).prepare(torch.randn(2, 3), training=training)
    assert net.sums.shape == (0,)


@pytest.mark.parametrize("reads", [False, True])
def test_prepare_leaves_no_trace(reads: bool) -> None:
    """Modes, hooks, buffers, attributes, gradients and random numbers are as before, whether or not it worked."""
    net = Caches(reads=reads)
    net.linear.eval()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    before = {n: t.clone() for n, t in net.state_dict().items()}
    strides = [p.stride() for p in net.parameters()]
    nimble = Nimble(net)
    if reads:
        with pytest.raises(CannotRecord, match=r"_local_scalar_dense.*test_nimble_inference\.py:\d+"):
            nimble.prepare(torch.randn(2, 3, generator=torch.Generator().manual_seed(1)))
    else:
        nimble.prepare(torch.randn(2, 3, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(torch.rand(4), expected)
    assert net.training
    assert not net.linear.training
    assert (net.shapes, hasattr(net, "last")) == ([], False)
    assert all(torch.equal(t, before[n]) for n, t in net.state_dict().items())
    assert [p.stride() for p in net.parameters()] == strides
    assert all(p.grad is None for p in net.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    net.reads = False
    nimble.prepare(torch.randn(2, 3))
    x = torch.randn(2, 3)
    torch.testing.assert_close(nimble(x), net.linear(x).detach())
    assert float(net.count) == 1  # the replay counts as eager does


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.register_buffer("grid", torch.rand(1, 2, 5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x * self.grid)


def strides(net: nn.Module) -> list[tuple[int, ...]]:
    return [t.stride() for t in net.state_dict().values()]


def test_release_lays_weights_and_buffers_out_as_they_were() -> None:
    """Whatever layout a schedule chose for them, each has its own again, and its values."""
    net = Images()
    before, own = strides(net), {n: t.clone() for n, t in net.state_dict().items()}
    nimble = prepared(net, torch.rand(1, 2, 5, 5))
    Variants(net).use(Source(kernels="eager", layout="channels-last"))
    assert strides(net) != before
    nimble.release()
    assert strides(net) == before
    assert all(torch.equal(t, own[n]) for n, t in net.state_dict().items())


def test_a_failure_lays_weights_and_buffers_out_as_they_were() -> None:
    """An error after a layout was chosen leaves the module as it was given."""
    net = Images()
    before, places = strides(net), [t.data_ptr() for t in net.state_dict().values()]

    def fail() -> None:
        with restoring_state(net, torch.device("cpu")):
            Variants(net).use(Source(kernels="eager", layout="channels-last"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (strides(net), [t.data_ptr() for t in net.state_dict().values()]) == (before, places)


def test_fallback_runs_in_eager_and_says_why() -> None:
    """With `fallback`, a model that cannot be scheduled still answers."""
    net = Caches(reads=True)
    nimble = prepared(net, torch.randn(2, 3), fallback=True)
    assert nimble.fallback is not None
    assert "reads a value of the device on the host" in nimble.fallback
    assert nimble.schedule is None
    x = torch.randn(2, 3)
    y = nimble(x)
    assert not y.requires_grad
    torch.testing.assert_close(y, eager(net, x))
    with pytest.raises(UsageError, match=r"^there is nothing to replay: "):
        nimble.replay()


def test_a_schedule_that_disagrees_with_eager_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed check is an error, and leaves earlier signatures alone."""
    net = Net()
    nimble = prepared(net, torch.randn(2, 3))

    def refuse(*_: Any, **__: Any) -> float:
        raise CheckFailed("output 'output' differs", error=1.0)

    monkeypatch.setattr(verify, "check", refuse)
    with pytest.raises(CheckFailed, match=r"^output 'output' differs$"):
        nimble.prepare(torch.randn(5, 3))
    x = torch.randn(2, 3)
    same(nimble(x), eager(net, x))
    with pytest.raises(UsageError, match=r"^args\.0: found float32\[5, 3\]"):
        nimble(torch.randn(5, 3))


class Opaque(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return {"y": x + 1, "state": object()}


def test_outputs_that_a_replay_cannot_make_are_refused() -> None:
    """An object that may hold tensors unseen is named."""
    with pytest.raises(CannotRecord, match=r"^the model's output 'state' is a object; expected tensors and plain"):
        prepared(Opaque(), torch.randn(2))
