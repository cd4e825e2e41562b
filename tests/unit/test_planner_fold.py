"""Folding: which normalisations fold into which convolutions, and that the folded module computes the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from nimble_jobs.engine.difference import relative_norm
from nimble_jobs.engine.record import record, state_of
from nimble_jobs.errors import EngineError
from nimble_jobs.planner.sources.fold import Pairs, foldable, folded
from nimble_jobs.planner.sources.source import Source, Variants

CPU = torch.device("cpu")


class Net(nn.Module):
    """One pair that folds, and four that must not."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.read_twice, self.norm_twice = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.shared, self.norm_shared = nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4)
        self.transposed, self.norm_transposed = nn.ConvTranspose2d(4, 4, 1), nn.BatchNorm2d(4)
        self.by_batch = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, track_running_stats=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.plain(x)
        y = self.read_twice(x)
        x = self.norm_twice(y) + y
        x = self.norm_shared(self.shared(x)) + self.shared(x * 2)
        return self.by_batch(self.norm_transposed(self.transposed(x)))  # type: ignore[no-any-return]


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    module = Net().eval()
    for child in module.modules():
        if isinstance(child, nn.BatchNorm2d) and child.running_mean is not None and child.running_var is not None:
            child.running_mean.normal_()
            child.running_var.uniform_(0.5, 2)
            child.weight.data.normal_()
            child.bias.data.normal_()
    return module


def pairs_of(module: nn.Module, x: torch.Tensor) -> Pairs:
    return foldable(record(module, {"x": x}, state_of(module), CPU, module).program, module)


def test_only_what_nothing_else_reads_folds() -> None:
    """A convolution that is read or called twice, a transposed one, and statistics of the batch stay as they are."""
    assert pairs_of(net(), torch.randn(2, 3, 5, 5)) == (("plain.0", "plain.1"),)


def test_a_folded_copy_has_tables_of_its_own() -> None:
    """Also those that held nothing when it was made; a table that two parts share is shared by their copies."""
    module = net()
    module.kept = module.plain.kept = {}
    twin = folded(module, ())
    twin.kept["a"] = 1  # type: ignore[index, operator]
    twin.plain[2].register_forward_hook(lambda *_: None)
    assert twin.plain.kept is twin.kept  # type: ignore[union-attr]
    assert not module.kept
    for name, table in vars(twin).items():
        if isinstance(table, dict):
            assert type(table) is type(vars(module)[name])
            assert table is not vars(module)[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_folded_module_computes_the_same_with_the_weights_of_its_time(dtype: torch.dtype) -> None:
    """Constants are computed from the weights that the module has when it is folded; the module itself is untouched."""
    module = net().to(dtype)
    x = torch.randn(2, 3, 5, 5, dtype=dtype)
    pairs = pairs_of(module, x)
    other = net(1).to(dtype)
    before = {n: t.clone() for n, t in other.state_dict().items()}
    twin = folded(other, pairs)
    assert isinstance(twin.get_submodule("plain.1"), nn.Identity)
    assert relative_norm(twin(x), other(x)) < 1e-5
    assert all(torch.equal(t, before[n]) for n, t in other.state_dict().items())
    assert twin.get_parameter("shared.weight") is other.get_parameter("shared.weight")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_many_pairs_fold_as_each_alone(dtype: torch.dtype) -> None:
    """With and without a bias, of several widths, whatever is added to the variance. Each has memory of its own."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    inputs = 3
    for width, bias, eps in ((4, False, 1e-5), (6, True, 1e-5), (3, False, 1e-3), (5, False, 1e-5), (4, True, 1e-3)):
        layers += [nn.Conv2d(inputs, width, 1, bias=bias), nn.BatchNorm2d(width, eps=eps)]
        inputs = width
    module = nn.Sequential(*layers).to(dtype).eval()
    for norm in layers[1::2]:
        assert isinstance(norm, nn.BatchNorm2d)
        for tensor in (norm.running_mean, norm.running_var, norm.weight.data, norm.bias.data):
            assert tensor is not None
            tensor.uniform_(0.5, 2)
    pairs = tuple((str(i), str(i + 1)) for i in range(0, len(layers), 2))
    together = folded(module, pairs)
    for pair in pairs:
        alone = folded(module, (pair,)).get_submodule(pair[0])
        for name, tensor in together.get_submodule(pair[0]).named_parameters():
            assert torch.equal(tensor, alone.get_parameter(name))
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
    x = torch.randn(2, 3, 5, 5, dtype=dtype)
    with torch.no_grad():
        assert relative_norm(together(x), module(x)) < (1e-5 if dtype is torch.float32 else 1e-2)


def test_what_a_call_does_beside_its_forward_does_not_fold() -> None:
    """A hook or a parametrisation would be lost; statistics in training mode are those of the batch."""
    x = torch.randn(2, 3, 5, 5)
    hooked, parametrised, training = net(), net(), net()
    hooked.plain[1].register_forward_hook(lambda _m, _a, out: out * 1.0005)
    parametrize.register_parametrization(parametrised.plain[0], "weight", nn.Tanh())
    training.plain[1].train()
    assert pairs_of(hooked, x) == pairs_of(parametrised, x) == pairs_of(training, x) == ()


@pytest.mark.parametrize("gone", ["weight", "bias"])
def test_a_normalisation_without_one_of_its_tensors_does_not_fold(gone: str) -> None:
    """The others do, and none takes another's tensor."""
    module = nn.Sequential(nn.Conv2d(2, 1, 1), nn.BatchNorm2d(1), nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3)).eval()
    module[1].get_parameter("bias").data.fill_(5)
    setattr(module[3], gone, None)
    x = torch.randn(1, 2, 3, 3)
    with torch.no_grad():
        pairs = foldable(record(module, {"x": x}, state_of(module), CPU, module).program, module)
        assert pairs == (("0", "1"),)
        torch.testing.assert_close(folded(module, pairs)(x), module(x))


def test_pairs_that_the_module_does_not_have_are_an_error() -> None:
    """A schedule of another module is not forced upon this one."""
    with pytest.raises(EngineError, match="cannot be folded"):
        folded(net(), [("plain.9", "plain.1")])


def test_variants_come_and_go_without_a_trace() -> None:
    """Layouts and folded copies leave addresses and strides of the given weights as they were."""
    module = net()
    given = {n: (t.data_ptr(), t.stride()) for n, t in module.state_dict().items()}
    variants = Variants(module)
    twin = variants.use(Source(kernels="eager", layout="channels-last", folded=(("plain.0", "plain.1"),)))
    assert twin is not module
    assert twin.get_parameter("plain.0.weight").is_contiguous(memory_format=torch.channels_last)
    assert twin.get_parameter("shared.weight").is_contiguous(memory_format=torch.channels_last)
    assert variants.use() is module
    assert {n: (t.data_ptr(), t.stride()) for n, t in module.state_dict().items()} == given
