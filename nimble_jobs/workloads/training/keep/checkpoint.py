"""Checkpoints on the disk, in a folder beside the training's output. Each appears whole, or not at all.

    .NAME.training/0123456789abcdef/step-00000100/     the digest names what decides the training

step-00000100/model.safetensors     the model's weights; score jobs take them, and so does train.init_from
step-00000100/state.safetensors     optimizer, scaler, and buffers that are not in the model's state dict
step-00000100/steps.safetensors     the figures of each step
step-00000100/checkpoint.json       position, random states, spec; size and SHA-256 of each file, and of itself

Jobs of the same training share the folder: they would write the same bits.
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

from nimble_jobs.data.files import link_or_copy, remove_tree, reported
from nimble_jobs.data.hidden import DAMAGED, STEP, TEMPORARY, training_root
from nimble_jobs.errors import Damaged
from nimble_jobs.regular import read_regular
from nimble_jobs.spec.paths import CHECKPOINT
from nimble_jobs.whole import sync_path

MODEL, STATE, STEPS = "model.safetensors", "state.safetensors", "steps.safetensors"
_FORMAT = 1

Bytes = bytes | memoryview


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose files matched its sheet when it was read. The sheet is checkpoint.json."""

    path: Path
    sheet: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.sheet["progress"]["step"])

    @property
    def best_step(self) -> int | None:
        """The step of the best epoch so far, whose checkpoint this one relies on."""
        best = self.sheet["progress"]["best"]
        return None if best is None else int(best["step"])

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """The contents of one of its files, on the host. Raises Damaged."""
        data = _checked(self.path / name, self.sheet["files"][name])
        try:
            return load(data)
        except (SafetensorError, ValueError, KeyError) as e:
            raise Damaged(f"{self.path / name}: not a safetensors file: {e}") from e


@dataclass(frozen=True, kw_only=True)
class Newest:
    """The newest sound checkpoint, and why newer ones are not sound."""

    checkpoint: Checkpoint | None
    damaged: tuple[str, ...] = ()


class Checkpoints:
    """The checkpoints of one training. `key` names the training, `owner` the job that writes."""

    def __init__(self, output: Path, key: str, *, owner: str) -> None:
        self.owner = owner
        self._root = training_root(output)
        self.folder = self._root / key

    def path(self, step: int) -> Path:
        """Where the checkpoint after `step` steps is."""
        return self.folder / f"{STEP}{step:08d}"

    def newest(self) -> Newest:
        """Read checkpoints, the newest first, until one is sound, and so is the best one that it relies on.

        Every byte is hashed. Damaged ones are set aside under another name.
        """
        damaged: list[str] = []
        with reported(self.folder):
            waiting = sorted(self._steps())
            while waiting:
                step = waiting.pop()
                try:
                    sound = read(self.path(step))
                    best = sound.best_step
                    if best is not None and best != step:
                        read(self.path(best))
                    return Newest(checkpoint=sound, damaged=tuple(damaged))
                except Damaged as e:
                    if not self.path(step).exists():  # another job of this training has pruned it and has newer ones
                        waiting = sorted(self._steps())
                        continue
                    damaged.append(str(e))
                    aside = self.folder / f"{DAMAGED}{step:08d}"
                    remove_tree(aside)
                    self.path(step).rename(aside)
        return Newest(checkpoint=None, damaged=tuple(damaged))

    def others(self) -> list[Path]:
        """The newest checkpoint of each other training with the same output."""
        newest = []
        for folder in sorted(self._root.glob("*")):
            if folder != self.folder:
                newest += sorted(p for p in folder.glob(f"{STEP}*") if (p / CHECKPOINT).is_file())[-1:]
        return newest

    def write(self, step: int, sheet: Mapping[str, Any], files: Mapping[str, Sequence[Bytes]]) -> None:
        """Write a checkpoint durably, or not at all. A sound one of the same step is left as it is.

        `files` gives the pieces of each file by its name. Raises DataError if it cannot be written.
        """
        path = self.path(step)
        with reported(path):
            try:
                _write(path, sheet, files, self.owner)
            except FileNotFoundError:  # another job of this training ended and removed the folder
                _write(path, sheet, files, self.owner)

    def adopt(self, other: Checkpoint) -> None:
        """Copy a checkpoint from another folder, unless it is here. Raises DataError if it cannot be written."""
        path = self.path(other.step)
        if path.exists():
            return
        with reported(path):
            temporary = _aside(path, self.owner)
            temporary.mkdir(parents=True)
            for name in (*other.sheet["files"], CHECKPOINT):
                link_or_copy(other.path / name, temporary / name)
            sync_path(temporary)
            _move(temporary, path, self.owner)
            remove_tree(temporary)

    def prune(self, step: int, keep_last: int, best: int | None) -> None:
        """Remove checkpoints up to `step`, except the last ones and the one of step `best`.

        Another job has written any later ones.
        """
        with reported(self.folder):
            for old in sorted(s for s in self._steps() if s <= step)[:-keep_last]:
                if old != best:
                    aside = _aside(self.path(old), self.owner)
                    self.path(old).rename(aside)  # a half removed one must not look damaged
                    remove_tree(aside)

    def clear(self) -> None:
        """Remove the training's folder, and the one around it if nothing else is in it."""
        with reported(self.folder):
            remove_tree(self.folder)
            try:
                self._root.rmdir()
            except OSError:  # not there, or another training has checkpoints in it
                return

    def tidy(self) -> None:
        """Remove the half written checkpoints of earlier attempts of this job."""
        with reported(self.folder):
            for path in self.folder.glob(f"{TEMPORARY}{self.owner}-*"):
                remove_tree(path)

    def _steps(self) -> list[int]:
        names = [p.name.removeprefix(STEP) for p in self.folder.glob(f"{STEP}*")]
        return [int(name) for name in names if name.isdigit()]


def read(path: Path) -> Checkpoint:
    """The checkpoint in a folder, with every byte hashed. Raises Damaged, naming the file and what is wrong."""
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
            raise Damaged(f"{file}: its bytes differ from what was written")
        sheet: dict[str, Any] = json.loads(body)
    except OSError as e:
        raise Damaged(f"{file}: {e.strerror or e}") from e
    except (ValueError, KeyError, TypeError) as e:
        raise Damaged(f"{file}: its bytes differ from what was written") from e
    if sheet.get("format") != _FORMAT:
        raise Damaged(f"{file}: has format {sheet.get('format')}; expected {_FORMAT}")
    return sheet


def _write(path: Path, sheet: Mapping[str, Any], files: Mapping[str, Sequence[Bytes]], owner: str) -> None:
    temporary = _aside(path, owner)
    try:
        temporary.mkdir(parents=True)
        entries = {name: _write_file(temporary / name, pieces) for name, pieces in files.items()}
        body = json.dumps({"format": _FORMAT, **sheet, "files": entries}).encode()
        digest = json.dumps({"sha256": hashlib.sha256(body).hexdigest()}).encode()
        _write_file(temporary / CHECKPOINT, (digest, b"\n", body, b"\n"))
        sync_path(temporary)
        _move(temporary, path, owner)
        sync_path(path.parent)
    finally:
        remove_tree(temporary)


def _write_file(path: Path, pieces: Iterable[Bytes]) -> dict[str, Any]:
    """Write and sync a file, and return its size and SHA-256."""
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
    """The bytes of a file. Raises Damaged if they do not match its entry in the sheet."""
    try:
        data = read_regular(path)
    except OSError as e:
        raise Damaged(f"{path}: {e.strerror or e}") from e
    if len(data) != entry["bytes"]:
        raise Damaged(f"{path}: has {len(data)} bytes; expected {entry['bytes']}")
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise Damaged(f"{path}: its bytes differ from what was written")
    return data


def _aside(path: Path, owner: str) -> Path:
    """A name beside `path` that nobody takes for a checkpoint."""
    return path.with_name(f"{TEMPORARY}{owner}-{path.name}-{uuid.uuid4().hex[:12]}")


def _move(temporary: Path, path: Path, owner: str) -> None:
    """Give the folder its name, unless another job of this training has just written the same step."""
    try:
        temporary.rename(path)
        return
    except OSError as e:
        if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    try:
        read(path)
    except Damaged:
        damaged = _aside(path, owner)
        path.rename(damaged)
        temporary.rename(path)
        remove_tree(damaged)
