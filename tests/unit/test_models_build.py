"""Building models from torchvision, timm and transformers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nimble_jobs.errors import ModelError
from nimble_jobs.models import from_timm, from_torchvision
from nimble_jobs.models.build import build, save_weights
from nimble_jobs.models.undrawn import Undrawn
from nimble_jobs.spec.model import ModelSpec


def of(source: str, **more: Any) -> nn.Module:
    return build(ModelSpec(source=source, **more))


def same(a: nn.Module, b: nn.Module) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return list(x) == list(y) and all(torch.equal(x[n], y[n]) for n in x)


def test_a_model_is_ready_to_run() -> None:
    """Eval mode, arguments applied, in the dtype of the spec; integer buffers keep theirs."""
    module = of("torchvision:resnet18", args={"num_classes": 3}, dtype="bf16")
    assert not any(m.training for m in module.modules())
    assert module.fc.weight.dtype is torch.bfloat16
    assert module.bn1.num_batches_tracked.dtype is torch.int64
    assert module(torch.zeros(1, 3, 32, 32, dtype=torch.bfloat16)).shape == (1, 3)


def test_the_seed_decides_and_leaves_no_trace() -> None:
    """Equal seeds give equal weights, others do not; every generator of the process goes on as if nothing happened."""

    def draws() -> list[float]:
        return [torch.rand(()).item(), float(np.random.random()), random.random()]

    def reset() -> None:
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)

    reset()
    expected = draws()
    reset()
    first, second = (of("torchvision:squeezenet1_1", seed=5) for _ in range(2))
    assert draws() == expected
    assert same(first, second)
    assert not same(first, of("torchvision:squeezenet1_1", seed=6))


def test_weights_of_a_file_are_loaded(tmp_path: Path) -> None:
    """The file wins over the seed, and must fit; a missing one is said before anything is built."""
    source = "torchvision:resnet18"
    first = of(source, args={"num_classes": 4}, seed=1)
    save_weights(first, tmp_path / "m.safetensors")
    weights = str(tmp_path / "m.safetensors")
    assert same(first, of(source, args={"num_classes": 4}, seed=2, weights=weights))
    with pytest.raises(ModelError, match=r"2 of wrong shape: fc\.weight"):
        of(source, weights=weights)
    with pytest.raises(ModelError, match=r"gone\.pt: no such file"):
        of(source, weights=str(tmp_path / "gone.pt"))


@pytest.mark.parametrize("name", ["resnet18", "swin_t", "googlenet"])
def test_no_numbers_are_drawn_for_weights_that_a_file_gives(name: str, tmp_path: Path) -> None:
    """The generator stands still while such a model is built, and every tensor comes from the file."""
    source = of(f"torchvision:{name}", seed=1)
    path = tmp_path / "w.safetensors"
    save_weights(source, path)
    assert same(source, of(f"torchvision:{name}", seed=2, weights=str(path)))
    before = torch.get_rng_state()
    from_torchvision.build(name, {}, None, drawn=False)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", ["inception_v3", "googlenet"])
def test_random_activations_neither_die_nor_explode(name: str) -> None:
    """The two builders without scaled random weights get them: two inputs give different, finite fp16-sized outputs."""
    module = of(f"torchvision:{name}")
    with torch.no_grad():
        out = module(torch.randn(2, 3, 96, 96, generator=torch.Generator().manual_seed(0)))
    assert 1e-3 < (out[0] - out[1]).abs().max() < 1e4


def test_backbones_are_not_downloaded() -> None:
    """Detection and segmentation builders would fetch backbone weights by default; here they do not."""
    module = of("torchvision:lraspp_mobilenet_v3_large", args={"num_classes": 2})
    assert isinstance(module, nn.Module)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"source": "torchvision:resnet19"}, "torchvision has no model 'resnet19'; did you mean resnet"),
        ({"args": {"nun_classes": 3}}, r"^model\.args\.nun_classes: torchvision:resnet18 takes no such argument$"),
        ({"args": {"num_classes": -2}}, r"^model\.args: torchvision:resnet18 cannot be built with num_classes=-2: "),
        ({"args": {"weights": "DEFAULT"}}, r"^model\.args\.weights: weights are chosen by model\.weights"),
        ({"args": {"pretrained": True}}, r"^model\.args\.pretrained: weights are chosen by model\.weights"),
        ({"weights": "IMAGENET1K_V9"}, "no weights 'IMAGENET1K_V9' for resnet18; it has IMAGENET1K_V1"),
        ({"source": "timm:resnet18", "weights": "DEFAULT"}, "only torchvision models have named weights"),
    ],
)
def test_what_cannot_be_built_is_named(spec: dict[str, Any], message: str) -> None:
    """Each refusal names the field and what is wrong with it."""
    with pytest.raises(ModelError, match=message):
        build(ModelSpec(**{"source": "torchvision:resnet18", **spec}))


def test_named_weights_come_from_the_hub_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that lies in the torch hub folder is used without any network."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    source = of("torchvision:squeezenet1_1", seed=3)
    torch.save(source.state_dict(), folder / "squeezenet1_1-b8a52dc0.pth")
    assert same(source, of("torchvision:squeezenet1_1", weights="DEFAULT"))
    (folder / "squeezenet1_1-b8a52dc0.pth").write_bytes(b"damaged")
    with pytest.raises(ModelError, match=r"squeezenet1_1-b8a52dc0\.pth"):
        of("torchvision:squeezenet1_1", weights="IMAGENET1K_V1")


def test_without_network_the_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A download that fails says which file to put where."""

    def unreachable(*_a: object, **_k: object) -> None:
        raise OSError("network is unreachable")

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(from_torchvision, "download", unreachable)
    with pytest.raises(ModelError, match=r"network is unreachable.*put the file resnet18-\w+\.pth there"):
        of("torchvision:resnet18", weights="DEFAULT")


def test_timm_models() -> None:
    """timm's models take arguments; what would load weights past model.weights is refused."""
    pytest.importorskip("timm")
    module = of("timm:resnet18", args={"num_classes": 5})
    assert module(torch.zeros(1, 3, 32, 32)).shape == (1, 5)
    for spec, message in (
        ({"source": "timm:resnet18x"}, "timm has no model 'resnet18x'; did you mean"),
        ({"source": "timm:resnet18", "args": {"pretrained": True}}, r"model\.args\.pretrained"),
        ({"source": "timm:resnet18", "args": {"nope": 1}}, r"^model\.args\.nope: timm:resnet18 takes no such"),
    ):
        with pytest.raises(ModelError, match=message):
            build(ModelSpec(**spec))


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_no_numbers_are_drawn_for_timms_models_that_a_file_gives(name: str, tmp_path: Path) -> None:
    """As for those of torchvision; also what is no parameter is the same."""
    pytest.importorskip("timm")
    source = of(f"timm:{name}", seed=1, args={"num_classes": 3})
    path = tmp_path / "w.safetensors"
    save_weights(source, path)
    loaded = of(f"timm:{name}", seed=2, weights=str(path), args={"num_classes": 3})
    assert same(source, loaded)
    buffers = dict(loaded.named_buffers())
    assert all(torch.equal(buffers[key], value) for key, value in source.named_buffers())
    before = torch.get_rng_state()
    from_timm.build(name, {}, drawn=False)
    assert torch.equal(before, torch.get_rng_state())


def test_only_what_follows_a_draw_at_once_is_left_out() -> None:
    """Of a parameter, and not of another tensor."""
    weight, other = nn.Parameter(torch.full((3,), 7.0)), torch.zeros(1000)
    with Undrawn(), torch.no_grad():
        weight.normal_().add_(1).mul_(3)  # still of the draw, as some initialisations scale what they drew
        weight.sub_(1)
        weight.mul_(2)
        nn.init.uniform_(other, 1, 2)
        other.add_(1)
    assert weight.tolist() == [12.0] * 3
    assert 2 <= float(other.min()) <= float(other.max()) <= 3


@pytest.mark.parametrize("extra", ["timm", "transformers"])
def test_a_missing_extra_says_how_to_install_it(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message holds the command to type."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ModelError, match=rf"pip install 'nimble-jobs\[{extra}\]'"):
        of(f"{extra}:/x" if extra == "transformers" else f"{extra}:x")


BERT = {
    "model_type": "bert", "architectures": ["BertForSequenceClassification"], "hidden_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50,
}  # fmt: skip


def folder(path: Path, **more: Any) -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**BERT, **more}))
    return f"transformers:{path}"


def test_transformers_take_one_tensor_and_return_named_ones(tmp_path: Path) -> None:
    """config.json alone gives seeded random weights; the one input is input_ids, the output a dict of tensors."""
    pytest.importorskip("transformers")
    source = folder(tmp_path / "m")
    module = of(source, args={"num_labels": 3}, dtype="bf16")
    out = module(torch.ones(2, 7, dtype=torch.int64))
    assert {k: (tuple(v.shape), v.dtype) for k, v in out.items()} == {"logits": ((2, 3), torch.bfloat16)}
    assert same(module, of(source, args={"num_labels": 3}, dtype="bf16"))
    assert not module.training


def test_transformers_without_architecture_are_bare_models(tmp_path: Path) -> None:
    """Without `architectures`, the bare model of the configuration's type."""
    pytest.importorskip("transformers")
    out = of(folder(tmp_path / "m", architectures=None))(torch.ones(2, 7, dtype=torch.int64))
    assert tuple(out["last_hidden_state"].shape) == (2, 7, 16)


def test_transformers_weights(tmp_path: Path) -> None:
    """The folder's weights are used, a file named by the spec wins, and missing ones are listed."""
    pytest.importorskip("transformers")
    source = folder(tmp_path / "m")
    first = of(source, seed=1)
    weights = tmp_path / "m" / "model.safetensors"
    save_weights(first, tmp_path / "other.safetensors")
    save_weights(of(source, seed=2), weights)
    assert same(of(source, seed=3), of(source, seed=2, weights=str(weights)))
    assert same(first, of(source, weights=str(tmp_path / "other.safetensors")))
    save_weights(first.bert, weights)
    with pytest.raises(ModelError, match=r"do not fit BertForSequenceClassification: .*classifier\.bias"):
        of(source)
    weights.write_bytes(b"damaged")
    with pytest.raises(ModelError, match="its weights cannot be loaded"):
        of(source)


def test_transformers_refusals(tmp_path: Path) -> None:
    """Unknown entries, hub code, damaged or missing configurations."""
    pytest.importorskip("transformers")
    with pytest.raises(ModelError, match=r"model\.args\.nun_labels: no such entry in the configuration"):
        of(folder(tmp_path / "m"), args={"nun_labels": 3})
    with pytest.raises(ModelError, match="code from a hub"):
        of(folder(tmp_path / "m", _attn_implementation="someone/kernel"))
    with pytest.raises(ModelError, match="cannot read the configuration"):
        of(folder(tmp_path / "m", model_type="no-such-type"))
    (tmp_path / "m" / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: not a model configuration"):
        of(f"transformers:{tmp_path / 'm'}")
    with pytest.raises(ModelError, match=r"config\.json: no such file"):
        of(f"transformers:{tmp_path}")
