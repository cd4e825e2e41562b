"""Reading and writing weights files."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from nimble_jobs.errors import ModelError
from nimble_jobs.models.weights import load_weights, read_weights, save_weights


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("part", torch.arange(6.0)[2:4])


def same(a: nn.Module, b: nn.Module) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return list(x) == list(y) and all(torch.equal(x[n], y[n]) for n in x)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2))


@pytest.mark.parametrize("make", [net, Tied])
def test_saved_weights_come_back(tmp_path: Path, make: type[nn.Module]) -> None:
    """Ties, views into larger storages and channels-last tensors survive; nothing but the file is left."""
    first, second = make(), make()
    if make is net:
        first = first.to(memory_format=torch.channels_last)
    save_weights(first, tmp_path / "m.safetensors")
    load_weights(second, tmp_path / "m.safetensors")
    assert same(first, second)
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]
    (tmp_path / "any").touch()
    assert (tmp_path / "m.safetensors").stat().st_mode == (tmp_path / "any").stat().st_mode


def test_loading_keeps_ties_and_layout(tmp_path: Path) -> None:
    """Weights are copied into the module's own tensors."""
    save_weights(Tied(), tmp_path / "m.safetensors")
    tied = Tied()
    load_weights(tied, tmp_path / "m.safetensors")
    assert tied.head.weight is tied.embed.weight


def test_a_tied_name_may_be_absent(tmp_path: Path) -> None:
    """One name of a tied pair is enough; two that differ are refused, for one of them would be lost."""
    tied = Tied()
    full = {n: t.clone() for n, t in tied.state_dict().items()}
    save_file({n: t for n, t in full.items() if n != "head.weight"}, tmp_path / "one.safetensors")
    load_weights(tied, tmp_path / "one.safetensors")
    full["head.weight"] += 1
    save_file(full, tmp_path / "two.safetensors")
    with pytest.raises(ModelError, match=r"1 tied in the model but .* file: embed\.weight and head\.weight"):
        load_weights(tied, tmp_path / "two.safetensors")


@pytest.mark.parametrize("wrap", [None, "state_dict", "model"])
@pytest.mark.parametrize("suffix", [".pt", ".pth"])
def test_pickled_state_dicts(tmp_path: Path, wrap: str | None, suffix: str) -> None:
    """A bare state dict, or one under a usual name beside other plain values."""
    first, second = net(), net()
    state = first.state_dict()
    torch.save({wrap: state, "epoch": 3} if wrap else state, tmp_path / f"m{suffix}")
    load_weights(second, tmp_path / f"m{suffix}")
    assert same(first, second)


def test_floating_types_are_converted(tmp_path: Path) -> None:
    """fp16 weights load into an fp32 module; integers do not load into floats."""
    save_weights(net().half(), tmp_path / "half.safetensors")
    module = net()
    load_weights(module, tmp_path / "half.safetensors")
    assert module[0].weight.dtype is torch.float32
    state = {n: t.clone() for n, t in net().state_dict().items()}
    state["2.weight"] = state["2.weight"].long()
    save_file(state, tmp_path / "long.safetensors")
    with pytest.raises(ModelError, match=r"1 of wrong type: 2\.weight \(file int64, model float32\)"):
        load_weights(module, tmp_path / "long.safetensors")


def test_what_does_not_fit_is_listed(tmp_path: Path) -> None:
    """Missing, unexpected and misshapen names with counts, and the module is left as it was."""
    module = net()
    before = {n: t.clone() for n, t in module.state_dict().items()}
    state = {n: t.clone() + 1 for n, t in before.items() if n != "2.bias"}
    state["2.weight"] = torch.zeros(7, 4)
    state["extra"] = torch.zeros(1)
    save_file(state, tmp_path / "m.safetensors")
    with pytest.raises(ModelError) as e:
        load_weights(module, tmp_path / "m.safetensors")
    assert str(e.value) == (
        f"{tmp_path / 'm.safetensors'}: does not fit the model: 1 missing: 2.bias; 1 unexpected: extra; "
        "1 of wrong shape: 2.weight (file [7, 4], model [2, 4])"
    )
    assert all(torch.equal(before[n], t) for n, t in module.state_dict().items())


def test_long_lists_are_capped(tmp_path: Path) -> None:
    """Ten names and a count."""
    save_file({f"x{i:02}": torch.zeros(1) for i in range(25)}, tmp_path / "m.safetensors")
    with pytest.raises(ModelError, match=r"25 unexpected: x00, .*x09 and 15 more$"):
        load_weights(nn.Module(), tmp_path / "m.safetensors")


def test_a_common_prefix_is_pointed_out(tmp_path: Path) -> None:
    """Weights of a data-parallel wrapper are recognised."""
    save_file({f"module.{n}": t.clone() for n, t in net().state_dict().items()}, tmp_path / "m.safetensors")
    with pytest.raises(ModelError, match=r"every name in the file starts with 'module\.'"):
        load_weights(net(), tmp_path / "m.safetensors")


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, (Path("must-not-appear"),))  # type: ignore[return-value]


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("content", [b"", b"garbage" * 100, b"PK\x03\x04broken"])
def test_damaged_files_are_named(tmp_path: Path, suffix: str, content: bytes) -> None:
    """Whatever lies in the file, the error is a ModelError that names it."""
    file = tmp_path / f"m{suffix}"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=rf"m\{suffix}: "):
        read_weights(file)


def test_truncated_files_are_named(tmp_path: Path) -> None:
    """A file cut off in the middle is refused, in both formats."""
    save_weights(net(), tmp_path / "a.safetensors")
    torch.save(net().state_dict(), tmp_path / "a.pt")
    for name in ("a.safetensors", "a.pt"):
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(data[: len(data) // 2])
        with pytest.raises(ModelError, match=name):
            read_weights(tmp_path / name)


def test_code_in_a_pickle_never_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickle that would call something is refused, and the message does not advise to load it unsafely."""
    monkeypatch.chdir(tmp_path)
    torch.save({"w": Evil()}, tmp_path / "new.pt")
    (tmp_path / "old.pt").write_bytes(pickle.dumps({"w": Evil()}, protocol=2))
    for name in ("new.pt", "old.pt"):
        with pytest.raises(ModelError, match="something other than plain tensors") as e:
            read_weights(tmp_path / name)
        assert "weights_only" not in str(e.value)
    assert not Path("must-not-appear").exists()


def test_other_contents_are_named(tmp_path: Path) -> None:
    """No file, no known suffix, no state dict: each is said."""
    torch.save(torch.zeros(2), tmp_path / "t.pt")
    torch.save({"a": torch.zeros(2), "b": 3}, tmp_path / "b.pt")
    (tmp_path / "x.h5").write_bytes(b"")
    for name, text in {
        "none.pt": "no such weights file",
        "t.pt": "holds a Tensor; expected a state dict",
        "b.pt": "'b' is a int; expected a state dict of tensors",
        "x.h5": "unknown kind of weights file",
    }.items():
        with pytest.raises(ModelError, match=text):
            read_weights(tmp_path / name)


def test_saving_replaces_whole_files_only(tmp_path: Path) -> None:
    """A module that cannot be saved, or a folder that is not there, leaves the old file and no rest."""
    save_weights(net(), tmp_path / "m.safetensors")
    old = (tmp_path / "m.safetensors").read_bytes()
    with pytest.raises(ModelError, match=r"weight is not a dense tensor"):
        save_weights(nn.Linear(2, 2, device="meta"), tmp_path / "m.safetensors")
    assert (tmp_path / "m.safetensors").read_bytes() == old
    with pytest.raises(ModelError, match="could not be written"):
        save_weights(net(), tmp_path / "no" / "m.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


def test_each_name_is_written(tmp_path: Path) -> None:
    """Tied names are all in the file, so that other readers can be strict."""
    save_weights(Tied(), tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors", "pt") as f:
        assert set(f.keys()) == {"embed.weight", "head.weight", "part"}
