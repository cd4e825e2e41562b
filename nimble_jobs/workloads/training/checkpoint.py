"""One checkpoint on the disk: a folder that appears whole, and that is hashed before anything in it is used.

step-00000100/model.safetensors     the model's weights; a score job takes them, and so does train.init_from
step-00000100/state.safetensors     optimizer, scaler, buffers that are no weights, and the figures of each step
step-00000100/checkpoint.json       position, random states, spec; size and SHA-256 of the two, and of itself
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from nimble_jobs.data.files import link_or_copy, remove_tree, reported, sync_folder
from nimble_jobs.data.hidden import TEMPORARY
from nimble_jobs.errors import Damaged
from nimble_jobs.regular import read_regular
from nimble_jobs.spec.paths import CHECKPOINT

MODEL, STATE, STEPS = "model.safetensors", "state.safetensors", "steps.safetensors"
_FORMAT = 1

Bytes = bytes | memoryview


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose files were what its sheet says when it was read."""

    path: Path
    sheet: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.sheet["progress"]["step"])

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """What one of its files holds, on the host. Raises Damaged."""
        data = _checked(self.path / name, self.sheet["files"][name])
        try:
            return load(data)
        except (SafetensorError, ValueError, KeyError) as e:
            raise Damaged(f"{self.path / name}: not a safetensors file: {e}") from e


def write(path: Path, sheet: Mapping[str, Any], files: Mapping[str, Sequence[Bytes]], *, owner: str) -> None:
    """Write a checkpoint durably, or not at all; one that is there already under this name is left where it is sound.

    Files are given in pieces; `owner` names what is half written. Raises DataError where it cannot be written.
    """
    with reported(path):
        try:
            _write(path, sheet, files, owner)
        except FileNotFoundError:  # another job of this training ended, and took the folder with it
            _write(path, sheet, files, owner)


def _write(path: Path, sheet: Mapping[str, Any], files: Mapping[str, Sequence[Bytes]], owner: str) -> None:
    temporary = aside(path, owner)
    try:
        temporary.mkdir(parents=True)
        entries = {name: _written(temporary / name, pieces) for name, pieces in files.items()}
        body = json.dumps({"format": _FORMAT, **sheet, "files": entries}).encode()
        digest = json.dumps({"sha256": hashlib.sha256(body).hexdigest()}).encode()
        _written(temporary / CHECKPOINT, (digest, b"\n", body, b"\n"))
        sync_folder(temporary)
        _move(temporary, path, owner)
        sync_folder(path.parent)
    finally:
        remove_tree(temporary)


def adopt(found: Checkpoint, path: Path, *, owner: str) -> None:
    """Put a copy of a checkpoint under another name. Raises DataError where it cannot be written."""
    with reported(path):
        temporary = aside(path, owner)
        temporary.mkdir(parents=True)
        for name in (*found.sheet["files"], CHECKPOINT):
            link_or_copy(found.path / name, temporary / name)
        sync_folder(temporary)
        _move(temporary, path, owner)
        remove_tree(temporary)


def aside(path: Path, owner: str) -> Path:
    """A name beside `path` that no one takes for a checkpoint."""
    return path.with_name(f"{TEMPORARY}{owner}-{path.name}-{uuid.uuid4().hex[:12]}")


def read(path: Path) -> Checkpoint:
    """The checkpoint in a folder, every byte of it hashed. Raises Damaged, naming the file and what is wrong."""
    sheet = read_sheet(path)
    for name, entry in sheet["files"].items():
        _checked(path / name, entry)
    return Checkpoint(path=path, sheet=sheet)


def read_sheet(path: Path) -> dict[str, Any]:
    """The sheet alone. Raises Damaged."""
    file = path / CHECKPOINT
    try:
        head, _, body = read_regular(file).partition(b"\n")
        digest = json.loads(head)["sha256"]
        body = body.removesuffix(b"\n")
        if hashlib.sha256(body).hexdigest() != digest:
            raise Damaged(f"{file}: is not what was written")
        sheet: dict[str, Any] = json.loads(body)
    except OSError as e:
        raise Damaged(f"{file}: {e.strerror or e}") from e
    except (ValueError, KeyError, TypeError) as e:
        raise Damaged(f"{file}: is not what was written") from e
    if sheet.get("format") != _FORMAT:
        raise Damaged(f"{file}: has format {sheet.get('format')}; expected {_FORMAT}")
    return sheet


def _written(path: Path, pieces: Iterable[Bytes]) -> dict[str, Any]:
    """Write and sync a file; its size and SHA-256."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"sha256": digest.hexdigest(), "bytes": size}


def _checked(path: Path, entry: Mapping[str, Any]) -> bytes:
    """The bytes of a file. Raises Damaged where they are not those of its entry."""
    try:
        data = read_regular(path)
    except OSError as e:
        raise Damaged(f"{path}: {e.strerror or e}") from e
    if len(data) != entry["bytes"]:
        raise Damaged(f"{path}: has {len(data)} bytes; expected {entry['bytes']}")
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise Damaged(f"{path}: is not what was written")
    return data


def _move(temporary: Path, path: Path, owner: str) -> None:
    """Give the folder its name, unless another job of this training wrote the same step just now."""
    try:
        temporary.rename(path)
        return
    except OSError as e:
        if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    try:
        read(path)
    except Damaged:
        damaged = aside(path, owner)
        path.rename(damaged)
        temporary.rename(path)
        remove_tree(damaged)
