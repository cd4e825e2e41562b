"""Exported programs: what runs, and what is refused as code."""

from __future__ import annotations

import json
import logging
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nimble_jobs.errors import ModelError
from nimble_jobs.models.build import build, save_weights
from nimble_jobs.models.from_exported import check_sizes
from nimble_jobs.models.pt2_check import why_code
from nimble_jobs.packing import text_layout
from nimble_jobs.planner import Request
from nimble_jobs.planner.jobs.loaded import build_module
from nimble_jobs.spec.model import ModelSpec, ScheduleSpec


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            y = self.linear(x) * self.scale + torch.tensor([1.0, 2.0, 3.0])
        return {"y": y, "flat": y.reshape(x.shape[0] * 3)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Net, Path]:
    """A module and its exported program, whose first size is free."""
    torch.manual_seed(0)
    module = Net().eval()
    path = tmp_path_factory.mktemp("exported") / "net.pt2"
    free = torch.export.Dim("n", min=2, max=64)
    torch.export.save(torch.export.export(module, (torch.zeros(4, 4),), dynamic_shapes={"x": {0: free}}), path)
    return module, path


def of(path: Path, allowed: Path | None = None, **more: Any) -> nn.Module:
    return build(ModelSpec(source=f"exported:{path}", **more), allowed_python=[allowed] if allowed else [])


def test_an_exported_program_runs(saved: tuple[Net, Path], caplog: pytest.LogCaptureFixture) -> None:
    """It gives what the module gave, without any permission; eval() is harmless, its input shapes are in the log."""
    module, path = saved
    with caplog.at_level(logging.INFO):
        loaded = of(path)
    x = torch.randn(7, 4)
    assert torch.allclose(loaded.eval()(x)["y"], module(x)["y"])
    assert not any(m.training for m in loaded.modules())
    assert "inputs [" in caplog.text
    with pytest.raises(ModelError, match="cannot be trained"):
        loaded.train()


def test_it_keeps_what_it_was_exported_with(saved: tuple[Net, Path]) -> None:
    """Another dtype, or arguments, are refused; sizes that it does not have are an error of the call."""
    _, path = saved
    with pytest.raises(ModelError, match=r"exported in torch\.float32; it cannot run in torch\.float16"):
        of(path, dtype="fp16")
    with pytest.raises(ModelError, match=r"model\.args\.width: an exported program takes no arguments"):
        of(path, args={"width": 3})
    with pytest.raises(AssertionError, match="Guard failed"):
        of(path)(torch.zeros(4, 5))


@pytest.mark.parametrize(
    ("free", "batch", "shape", "said"),
    [
        (
            None,
            5,
            (4,),
            "was exported with batches of 4, and input.batch_size is 5; set it to 4, or export with a free f",
        ),
        (torch.export.Dim("n", max=8), 9, (4,), "was exported with batches of 0 to 8, and input.batch_size is 9"),
        (None, 4, (7,), "was exported with records of shape [4], and those of the input have [7]"),
        (
            torch.export.Dim("n"),
            4,
            (4, 1),
            "was exported with records of shape [4], and those of the input have [4, 1]",
        ),
        (None, 4, (4,), None),
        (torch.export.Dim("n"), 9, (4,), None),
        (2 * torch.export.Dim("n"), 8, (4,), None),
        (torch.export.Dim.DYNAMIC, 1, (4,), None),
        (torch.export.Dim.AUTO, 1, (4,), None),
        (torch.export.Dim("n", min=2), 1, (4,), None),
        (torch.export.Dim("n", min=3), 1, (4,), "was exported with batches of at least 3, and input.batch_size is 1"),
    ],
)
def test_sizes_of_batches_are_compared_with_those_of_the_export(
    tmp_path: Path, free: Any, batch: int, shape: tuple[int, ...], said: str | None
) -> None:
    """Before the program is called, whose own guards do not tell what to change."""
    path = tmp_path / "net.pt2"
    free_first = {"x": {0: free}} if free is not None else None
    torch.export.save(torch.export.export(Net().eval(), (torch.zeros(4, 4),), dynamic_shapes=free_first), path)
    request = Request(
        model=ModelSpec(source=f"exported:{path}"),
        shape=shape,
        dtype="float32",
        batch_size=batch,
        schedule=ScheduleSpec(),
        embedding=False,
        allowed_python=(tmp_path,),
    )
    if said is None:
        assert build_module(request, torch.device("cpu"))(torch.zeros(batch, *shape))["y"].shape == (batch, 3)
        return
    with pytest.raises(ModelError, match=re.escape(f"model.source: exported:{path} {said}")):
        build_module(request, torch.device("cpu"))


@pytest.mark.parametrize("free", [torch.export.Dim.DYNAMIC, torch.export.Dim("c", min=2)])
def test_an_axis_of_records_may_have_one_place(tmp_path: Path, free: Any) -> None:
    """As batches of one record do: torch does not keep a free size from being 1."""
    program = torch.export.export(nn.ReLU(), (torch.zeros(4, 4),), dynamic_shapes={"input": {1: free}})
    torch.export.save(program, tmp_path / "net.pt2")
    module = of(tmp_path / "net.pt2")
    check_sizes(module, "exported:net.pt2", 4, (1,))
    assert module(torch.zeros(4, 1)).shape == (4, 1)


class OfTexts(nn.Module):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return input_ids * attention_mask


def test_batches_of_texts_have_sizes_that_no_field_sets(tmp_path: Path) -> None:
    """So the message only says how to export."""
    rows, layout = torch.ones(4, 8, dtype=torch.int64), text_layout(8)
    torch.export.save(torch.export.export(OfTexts(), (rows, rows)), tmp_path / "net.pt2")
    source = f"exported:{tmp_path}/net.pt2"
    request = Request(
        model=ModelSpec(source=source), shape=(layout.nbytes,), dtype="uint8", batch_size=5, packing=layout
    )
    with pytest.raises(ModelError) as raised:
        build_module(request, torch.device("cpu"))
    assert str(raised.value) == (
        f"model.source: {source} was exported with batches of 4, and batches of texts have other sizes, such as 5; "
        "export with a free first size (torch.export.Dim)"
    )


def test_weights_can_be_replaced(saved: tuple[Net, Path], tmp_path: Path) -> None:
    """A weights file is loaded strictly into it."""
    other = Net().eval()
    save_weights(other, tmp_path / "w.safetensors")
    x = torch.randn(3, 4)
    loaded = of(saved[1], weights=str(tmp_path / "w.safetensors"))
    assert torch.allclose(loaded(x)["y"], other(x)["y"])


def test_damaged_files_are_named(saved: tuple[Net, Path], tmp_path: Path) -> None:
    """Cut off, garbage, another archive, missing: each a ModelError that names the file."""
    data = saved[1].read_bytes()
    with zipfile.ZipFile(tmp_path / "zip.pt2", "w") as z:
        z.writestr("a/archive_format", "pt2")
    (tmp_path / "cut.pt2").write_bytes(data[: len(data) // 2])
    (tmp_path / "bad.pt2").write_bytes(b"garbage")
    for name in ("zip", "cut", "bad"):
        with pytest.raises(ModelError, match=rf"{name}\.pt2: not an exported program"):
            of(tmp_path / f"{name}.pt2")
    with pytest.raises(ModelError, match=r"none\.pt2: no such file"):
        of(tmp_path / "none.pt2")


def rewrite(path: Path, target: Path, member: str, change: Callable[[bytes], bytes]) -> Path:
    """Copy an archive, changing one member."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, change(data) if name.endswith(member) else data)
    return target


def program(edit: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        value = json.loads(data)
        edit(value)
        return json.dumps(value).encode()

    return change


def call_target(value: dict[str, Any]) -> None:
    value["graph_module"]["graph"]["nodes"][0]["target"] = "torch.hub.load"


def add_guard(value: dict[str, Any]) -> None:
    value["guards_code"] = ["__import__('os').system('true')"]


def call_attribute(value: dict[str, Any]) -> None:
    value["guards_code"] = ["L['x'].numpy().tofile(1)"]


def call_builtin(value: dict[str, Any]) -> None:
    value["guards_code"] = ["open('x')"]


def evil_size(value: dict[str, Any]) -> None:
    sizes = next(iter(value["graph_module"]["graph"]["tensor_values"].values()))["sizes"]
    sizes[0] = {"as_expr": {"expr_str": "exec('1')", "hint": None}}


def evil_name(value: dict[str, Any]) -> None:
    value["graph_module"]["graph"]["inputs"][0]["as_tensor"]["name"] = "x=print(1)"


def evil_tree(value: dict[str, Any]) -> None:
    signature = value["graph_module"]["module_call_graph"][0]["signature"]
    signature["in_spec"] = signature["in_spec"].replace("[]", '[\\"a=print(1)\\"]', 1)


def pickled_weight(value: dict[str, Any]) -> None:
    next(iter(value["config"].values()))["use_pickle"] = True


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, (Path("must-not-appear"),))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("member", "change", "reason"),
    [
        ("models/model.json", program(call_target), "target 'torch.hub.load'"),
        ("models/model.json", program(add_guard), "guards_code"),
        ("models/model.json", program(call_attribute), "guards_code"),
        ("models/model.json", program(call_builtin), "guards_code"),
        ("models/model.json", program(evil_size), "expr_str"),
        ("models/model.json", program(evil_name), "name 'x=print"),
        ("models/model.json", program(evil_tree), "in_spec"),
        ("model_weights_config.json", program(pickled_weight), "the pickled object"),
        ("sample_inputs/model.pt", lambda _: pickle.dumps(Evil(), protocol=2), "sample inputs are more than tensors"),
    ],
)
def test_programs_that_are_code_need_an_allowed_folder(
    saved: tuple[Net, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    member: str,
    change: Callable[[bytes], bytes],
    reason: str,
) -> None:
    """Whatever could run code when torch loads it is found before torch sees the file."""
    monkeypatch.chdir(tmp_path)
    path = rewrite(saved[1], tmp_path / "evil.pt2", member, change)
    with pytest.raises(ModelError, match="loading it can run code; allow its folder with --allow-python") as e:
        of(path)
    assert reason in str(e.value)
    assert not (tmp_path / "must-not-appear").exists()


def test_unknown_members_are_code(saved: tuple[Net, Path], tmp_path: Path) -> None:
    """A compiled library, or any other member that exporting tensors does not write."""
    path = tmp_path / "net.pt2"
    shutil.copy(saved[1], path)
    with zipfile.ZipFile(path, "a") as z:
        z.writestr(f"{z.namelist()[0].partition('/')[0]}/data/aotinductor/model/x.so", b"")
    with path.open("rb") as f:
        assert why_code(f) == "it holds net/data/aotinductor/model/x.so"


def test_an_allowed_folder_lets_code_through(saved: tuple[Net, Path], tmp_path: Path) -> None:
    """With permission, torch's loader decides."""

    def rename(value: dict[str, Any]) -> None:
        value["guards_code"] = ["max(1, 2) == 2"]

    path = rewrite(saved[1], tmp_path / "net.pt2", "models/model.json", program(rename))
    with pytest.raises(ModelError, match="can run code"):
        of(path)
    assert of(path, allowed=tmp_path)(torch.zeros(2, 4))["y"].shape == (2, 3)
