"""The networks of the benchmarks."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from nimble_jobs.bench import zoo
from nimble_jobs.bench.zoo import amoebanet, darts, nasnet
from nimble_jobs.bench.zoo.cells import Cell, CellSpec, FactorisedReduction
from nimble_jobs.bench.zoo.starting import start
from nimble_jobs.engine.record import flatten_outputs
from nimble_jobs.errors import ModelError

OURS = ("nasnet_a_mobile", "nasnet_a_large", "darts", "amoebanet")
# name: parameters and multiply-adds as published, in millions; cells, and reductions among them
PUBLISHED = {
    "nasnet_a_mobile": (5.3, 564, 16, 4),
    "nasnet_a_large": (88.9, 23_800, 22, 4),
    "darts": (4.7, None, 14, 2),  # the paper's 574 counts more than convolutions
    "amoebanet": (5.1, 555, 16, 4),
}


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return zoo.ZOO[name].factory().eval()


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def small(name: str) -> nn.Module:
    """The network's cells, one a stage and with few filters."""
    torch.manual_seed(0)
    if name == "darts":
        return start(darts.DARTS(filters=8, layers=3, num_classes=7), 64).eval()
    cells = amoebanet if name == "amoebanet" else nasnet
    network = nasnet.NASNet(
        cells.NORMAL,
        cells.REDUCTION,
        repeats=1,
        filters=20,  # a quarter of it is odd, as in the stem of the full size
        stem_filters=6,
        skip_reductions=name == "nasnet_a_large",
        num_classes=7,
    )
    return start(network, 64).eval()


@pytest.mark.parametrize("name", OURS)
def test_sizes_are_the_published_ones(name: str) -> None:
    """Parameters and multiply-adds at the paper's input size are what the paper prints; so are the cells."""
    parameters, multiply_adds, cells, reductions = PUBLISHED[name]
    module = on_meta(name)
    found = [part for part in module.modules() if isinstance(part, Cell)]
    assert len(found) == cells
    assert sum(part.reduction for part in found) == reductions
    assert size(module) / 1e6 == pytest.approx(parameters, rel=0.006)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        output = module(torch.empty(1, *zoo.ZOO[name].input_shape, device="meta"))
    assert output.shape == (1, 1000)
    if multiply_adds is not None:
        assert counter.get_total_flops() / 2e6 == pytest.approx(multiply_adds, rel=0.002)


def test_nasnet_large_is_as_large_as_timm_makes_it() -> None:
    """timm's network of that name has as many parameters."""
    timm = pytest.importorskip("timm")
    with torch.device("meta"):
        other = timm.create_model("nasnetalarge", pretrained=False)
    assert size(on_meta("nasnet_a_large")) == size(other)


@pytest.mark.parametrize("name", ["nasnet_a_mobile", "nasnet_a_large"])
def test_nasnet_is_named_for_its_last_filters(name: str) -> None:
    """N @ F: F filters reach the classifier."""
    assert on_meta(name).classifier.in_features == {"nasnet_a_mobile": 1056, "nasnet_a_large": 4032}[name]


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("side", [64, 75])
def test_any_size_of_image_goes(name: str, side: int) -> None:
    """Odd and even sizes give logits that are finite, not all alike, and others for another image."""
    module = small(name)
    with torch.inference_mode():
        x, y = module(torch.randn(2, 3, side, side)), module(torch.randn(2, 3, side, side))
    assert x.shape == (2, 7)
    assert x.isfinite().all()
    assert 0.05 < x.std() < 50
    assert (x - y).norm() > 0.01 * x.norm()


@pytest.mark.parametrize("name", OURS)
def test_one_graph_holds_the_network(name: str, pytestconfig: pytest.Config) -> None:
    """torch.compile finds one graph without breaks, and inputs are not written to."""
    if name == "nasnet_a_mobile" and not pytestconfig.getoption("--all"):
        pytest.skip("the larger one has its cells, and more; with --all")
    module, x = small(name), torch.randn(1, 3, 64, 64)
    before = x.clone()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), module(x))
    assert torch.equal(x, before)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["nasnet_a_mobile", "darts"])
def test_random_weights_suit_half_precision(name: str) -> None:
    """Full-size activations stay far below what fp16 holds, and logits are of order one."""
    largest = 0.0

    def note(_: nn.Module, inputs: object, output: Tensor) -> None:
        nonlocal largest
        largest = max(largest, output.abs().max().item())

    module = zoo.create(name)
    for part in module.modules():
        part.register_forward_hook(note)
    with torch.inference_mode():
        logits = module(zoo.example(name))
    assert logits.isfinite().all()
    assert 0.1 < logits.std() < 10
    assert largest < 1000


def test_a_factorised_reduction_sees_every_pixel() -> None:
    """The two halves read the even and the odd diagonal; an odd size is rounded up and padded with zeros."""
    part = FactorisedReduction(1, 2).eval()
    with torch.no_grad():
        for conv in (part.even, part.odd):
            conv.weight.fill_(1.0)
        for side in (4, 5):
            x = torch.arange(1.0, 1 + side * side).reshape(1, 1, side, side)
            y = part(x) * (1 + part.norm.eps) ** 0.5
            odd = torch.zeros_like(x[..., ::2, ::2])
            seen = x[..., 1::2, 1::2]
            odd[..., : seen.shape[-2], : seen.shape[-1]] = seen
            torch.testing.assert_close(y[0, 0], x[0, 0, ::2, ::2])
            torch.testing.assert_close(y[0, 1], odd[0, 0])


def test_a_cell_adds_and_joins_what_its_spec_says() -> None:
    """State 2 is the sum of its pair; the output joins the named states in order."""
    spec = CellSpec(pairs=((("none", 0), ("none", 1)), (("none", 2), ("none", 0))), output=(3, 1))
    cell = Cell(spec, (4, 4), 4, reduction=False)
    cell.before, cell.last = nn.Identity(), nn.Identity()
    a, b = torch.randn(1, 4, 3, 3), torch.randn(1, 4, 3, 3)
    torch.testing.assert_close(cell(a, b), torch.cat((a + b + a, b), dim=1))
    assert spec.filters_out(4) == 8


def test_the_zoo_has_the_twelve_of_the_benchmark() -> None:
    """Every entry can be built without weights; the heads that only training needs are gone."""
    names = {"resnet50", "resnet101", "inception_v3", "mobilenet_v2", "efficientnet_b0", "efficientnet_b5", "googlenet"}
    assert set(zoo.ZOO) == {*names, *OURS, "bert_base"}
    sides = {name: zoo.ZOO[name].input_shape[-1] for name in names}
    assert {name: side for name, side in sides.items() if side != 224} == {"inception_v3": 299, "efficientnet_b5": 456}
    millions = {name: size(on_meta(name)) / 1e6 for name in names}
    assert millions == pytest.approx(
        {
            "resnet50": 25.557,
            "resnet101": 44.549,
            "inception_v3": 23.835,
            "mobilenet_v2": 3.505,
            "efficientnet_b0": 5.289,
            "efficientnet_b5": 30.390,
            "googlenet": 6.625,
        },
        abs=1e-3,
    )


@pytest.mark.parametrize(
    ("name", "side", "millions"),
    [
        ("hrnet_w18", 64, 21.3),
        ("pnasnet5large", 96, 86.1),
        ("coat_tiny", 224, 5.5),
        ("mixnet_m", 64, 5.0),
        ("inception_v4", 96, 42.7),
        ("vit_base_patch16_224", 224, 86.6),
        ("densenet121", 64, 8.0),
        ("shufflenet_v2_x1_0", 64, 2.3),
        ("squeezenet1_1", 64, 1.2),
        ("deeplabv3_resnet50", 64, 39.6),
    ],
)
def test_those_that_the_paper_does_not_have(name: str, side: int, millions: float) -> None:
    """Each is built without weights, has its published size, and answers a small image with numbers of order one."""
    pytest.importorskip("timm")
    assert len(zoo.MORE) == 10
    factory = zoo.MORE[name].factory
    module = partial(factory.func, *factory.args[:-1], side)().eval()
    with torch.inference_mode():
        output = flatten_outputs(module(torch.randn(1, 3, side, side)))
    (logits,) = output.values()
    assert logits.shape == ((1, 21, side, side) if name.startswith("deeplab") else (1, 1000))
    assert logits.isfinite().all()
    assert 0.05 < logits.std() < 50
    assert size(module) / 1e6 == pytest.approx(millions, abs=0.05)
    assert zoo.example(name).shape == (1, *zoo.entry(name).input_shape)


def test_timm_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing extra is named, with the way to install it."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "timm" else find(name))
    with pytest.raises(ModelError, match=r"timm is not installed.*nimble-jobs\[timm\]"):
        zoo.create("hrnet_w18")


def test_the_seed_decides_the_weights() -> None:
    """Equal seeds give equal weights, others do not; the process's generator goes on as if nothing happened."""
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    a, b, c = zoo.create("mobilenet_v2"), zoo.create("mobilenet_v2"), zoo.create("mobilenet_v2", seed=1)
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
    assert not torch.equal(a.classifier[1].weight, c.classifier[1].weight)
    assert not any(part.training for part in a.modules())
    with torch.inference_mode():
        assert a(zoo.example("mobilenet_v2")).std() > 0.1


@pytest.mark.parametrize("name", ["nasnet_a_mobile", "mobilenet_v2"])
def test_weights_that_are_not_drawn_are_loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is drawn and the network does not run; with another one's weights it is that one."""
    drawn, states = zoo.create(name), list[torch.Tensor]()

    def eval_(module: torch.nn.Module) -> torch.nn.Module:  # the last call before the generator is put back
        states.append(torch.random.get_rng_state())
        return module.train(False)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Module, "eval", eval_)
        empty = zoo.create(name, drawn=False)
    torch.manual_seed(0)
    assert torch.equal(states[-1], torch.random.get_rng_state())
    empty.load_state_dict(drawn.state_dict())
    x = zoo.example(name)
    with torch.no_grad():
        torch.testing.assert_close(empty(x), drawn(x))


def test_bert_takes_tokens() -> None:
    """BERT-base has the published size, rounded to 110 M, and answers tokens alone."""
    pytest.importorskip("transformers")
    module = zoo.create("bert_base")
    assert size(module) == 109_482_240
    tokens = zoo.example("bert_base", batch=2)
    assert tokens.shape == (2, 128)
    assert tokens.dtype is torch.int64
    with torch.inference_mode():
        output = module(tokens[:, :8])
    assert {name: tuple(value.shape) for name, value in output.items()} == {
        "last_hidden_state": (2, 8, 768),
        "pooler_output": (2, 768),
    }
    assert all(value.isfinite().all() and value.std() > 0.01 for value in output.values())


def test_bert_without_transformers_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing extra is named, with the way to install it."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name))
    with pytest.raises(ModelError, match=r"transformers is not installed.*nimble-jobs\[transformers\]"):
        zoo.create("bert_base")


def test_an_unknown_name_is_an_error() -> None:
    """Names that look alike are offered."""
    with pytest.raises(ModelError, match=r"no model 'resnet5'; did you mean resnet50"):
        zoo.create("resnet5")


def test_the_names_need_no_torch() -> None:
    """The command line can list the zoo without loading torch."""
    code = "import sys; from nimble_jobs.bench import zoo; assert len(zoo.ZOO) == 12; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
