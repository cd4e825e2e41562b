"""Reading and writing weights files: only tensors are ever read, and they must fit the module exactly."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nimble_jobs.errors import ModelError
from nimble_jobs.regular import NotRegular, name_of, open_regular
from nimble_jobs.whole import sync_path

_LISTED = 10  # names of one kind in a message


def load_weights(module: nn.Module, path: Path) -> None:
    """Copy the weights in `path` into the module, in place; floating types are converted to the module's own.

    Every name and shape must match. A name that is absent is accepted where the module ties it to one that is there.
    Raises ModelError, naming the file and what is missing, unexpected or of another shape; the module stays as it was.
    """
    state = read_weights(path)
    expected = {name: t for name, t in module.state_dict().items() if isinstance(t, Tensor)}
    complaints = _complaints(state, expected)
    if complaints:
        hint = "" if not _prefixed(state, expected) else "; every name in the file starts with 'module.'"
        raise ModelError(f"{path}: does not fit the model: {'; '.join(complaints)}{hint}")
    try:
        # Strictness was checked above, where tied names are understood.
        module.load_state_dict(state, strict=False)
    except RuntimeError as e:
        raise ModelError(f"{path}: does not fit the model: {e}") from e


def read_weights(path: Path) -> dict[str, Tensor]:
    """The named tensors in a .safetensors, .pt or .pth file, on the CPU.

    A pickled file holds a state dict, or one under the name `state_dict` or `model`, and nothing that needs code to be
    loaded. Raises ModelError naming the file and the reason.
    """
    try:
        file = open_regular(path)
    except NotRegular as e:
        raise ModelError(f"{path}: {e}") from e
    except FileNotFoundError as e:
        raise ModelError(f"{path}: no such weights file") from e
    except OSError as e:
        raise ModelError(f"{path}: {e.strerror}; expected a readable weights file") from e
    with file:
        return _read(path, file)


def _read(path: Path, file: BinaryIO) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        try:
            return dict(load_file(name_of(file), device="cpu"))
        except (SafetensorError, OSError, ValueError, KeyError) as e:
            raise ModelError(f"{path}: not a readable safetensors file: {e}") from e
    if path.suffix not in (".pt", ".pth") and path.name != "pytorch_model.bin":
        raise ModelError(f"{path}: unknown kind of weights file; expected .safetensors, .pt or .pth")
    try:
        raw = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as e:
        # The full text recommends to load it unsafely.
        raise ModelError(
            f"{path}: holds something other than plain tensors, or is damaged; expected a state dict"
        ) from e
    except Exception as e:  # a damaged pickle or zip file can raise anything
        raise ModelError(f"{path}: not a readable weights file: {type(e).__name__}: {_first_line(e)}") from e
    return _state_dict(raw, path)


def save_weights(module: nn.Module, path: Path) -> None:
    """Write the module's state dict to a .safetensors file that appears whole and synced, or not at all.

    Tied and overlapping tensors are written once for each name, so that any reader can load the file strictly. Raises
    ModelError when the state holds anything but dense tensors, or the file cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor) or value.is_meta or value.layout is not torch.strided:
            raise ModelError(f"{path}: {name} is not a dense tensor; a weights file cannot hold it")
        copy = value.detach().to("cpu").contiguous()
        tensors[name] = copy.clone() if _shares(copy, tensors.values()) else copy
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        part.touch()
        mode = part.stat().st_mode  # as for any new file; safetensors keeps its own to their owner
        save_file(tensors, part, metadata={"format": "pt"})
        part.chmod(mode)
        sync_path(part)
        part.replace(path)
        sync_path(path.parent)
    except (SafetensorError, OSError, ValueError) as e:
        part.unlink(missing_ok=True)
        raise ModelError(f"{path}: could not be written: {e}") from e


def _complaints(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    present = {_view_of(t): name for name, t in expected.items() if name in state}
    missing = [n for n, t in expected.items() if n not in state and _view_of(t) not in present]
    unexpected = [n for n in state if n not in expected]
    both = [(n, state[n], t) for n, t in expected.items() if n in state]
    shapes = [f"{n} (file {list(f.shape)}, model {list(t.shape)})" for n, f, t in both if f.shape != t.shape]
    dtypes = [
        f"{n} (file {_dtype(f)}, model {_dtype(t)})"
        for n, f, t in both
        if f.dtype != t.dtype and not (f.is_floating_point() and t.is_floating_point())
    ]
    untied = [
        f"{n} and {present[_view_of(t)]}"
        for n, f, t in both
        if (other := present[_view_of(t)]) != n and f.shape == state[other].shape and not f.equal(state[other])
    ]
    kinds = {
        "missing": missing,
        "unexpected": unexpected,
        "of wrong shape": shapes,
        "of wrong type": dtypes,
        "tied in the model but different in the file": untied,
    }
    return [_listed(names, kind) for kind, names in kinds.items() if names]


def _listed(names: list[str], kind: str) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{len(names)} {kind}: {', '.join(names[:_LISTED])}{more}"


def _prefixed(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return bool(state) and all(n.startswith("module.") and n.removeprefix("module.") in expected for n in state)


def _state_dict(raw: object, path: Path) -> dict[str, Tensor]:
    for key in ("state_dict", "model"):
        if isinstance(raw, dict) and isinstance(raw.get(key), dict):
            raw = raw[key]
            break
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: holds a {type(raw).__name__}; expected a state dict")
    for name, value in raw.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ModelError(f"{path}: {name!r} is a {type(value).__name__}; expected a state dict of tensors")
    return dict(raw)


def _view_of(t: Tensor) -> object:
    """Equal for tensors that are the same view of the same memory; empty tensors are only equal to themselves."""
    if t.numel() == 0 or t.is_meta:
        return id(t)
    return (t.device, t.data_ptr(), t.dtype, tuple(t.shape), t.stride())


def _shares(t: Tensor, others: Iterable[Tensor]) -> bool:
    place = t.untyped_storage().data_ptr()
    whole = t.untyped_storage().nbytes() == t.numel() * t.itemsize
    return not whole or any(place == o.untyped_storage().data_ptr() for o in others)


def _dtype(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def _first_line(e: Exception) -> str:
    return str(e).split("\n", 1)[0]
