"""Makes the paths and sources of a spec absolute. It works on text only; the rules check that files exist."""

from __future__ import annotations

import glob
import os
import re
from dataclasses import dataclass
from os.path import exists
from pathlib import Path

from nimble_jobs.spec.units import BadValue, show

CHECKPOINT = "checkpoint.json"  # a folder with this file is a checkpoint
WEIGHTS_SUFFIXES = (".safetensors", ".pt", ".pth")
SOURCE_EXPECTED = "torchvision:NAME, timm:NAME, transformers:DIR, python:FILE.py:FACTORY or exported:FILE.pt2"
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_ENTRY = re.compile(r"[A-Z][A-Z0-9_]*")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_NAMES = {"torchvision": re.compile(r"[A-Za-z_][A-Za-z0-9_]*"), "timm": re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")}


def absolute(text: str, base: Path | None) -> str:
    """`text` as an absolute path; a relative one is relative to `base`. `..` is resolved by name. Raises BadValue."""
    if not text.strip():
        raise BadValue("found an empty path", "a path")
    if _CONTROL.search(text):
        raise BadValue(f"found {show(text)}, which holds control characters", "a path")
    if text.startswith("~"):
        raise BadValue(
            f"found {show(text)}, but ~ is not expanded", "an absolute path, or one relative to the spec file"
        )
    if _URL.match(text):
        raise BadValue(f"found {show(text)}, which is a URL", "a local path")
    return os.path.abspath(text if base is None else base / text)  # noqa: PTH100 - resolve() would follow symlinks


def absolute_glob(text: str, base: Path | None) -> str:
    """As `absolute`, for a file, folder or glob: `base` is escaped where `text` is a glob."""
    if base is not None and glob.has_magic(text) and not exists(base / text):  # noqa: PTH110 - Path raises
        base = Path(glob.escape(str(base)))
    return absolute(text, base)


def weights(text: str, base: Path | None) -> str:
    """A weights file as an absolute path, or the name of a torchvision weights entry as it is. Raises BadValue."""
    if text.endswith(WEIGHTS_SUFFIXES):
        return absolute(text, base)
    if _ENTRY.fullmatch(text):
        return text
    raise BadValue(f"found {show(text)}", "a .safetensors, .pt or .pth file, or a weights name such as DEFAULT")


def weights_file(text: str, base: Path | None) -> str:
    """A weights file as an absolute path. Raises BadValue for anything else."""
    if text.endswith(WEIGHTS_SUFFIXES):
        return absolute(text, base)
    if text.strip() and exists(os.path.join(base or "", text, CHECKPOINT)):  # noqa: PTH110, PTH118 - Path raises
        expected = "train.resume to continue its training, or its model.safetensors to start a new one"
        raise BadValue(f"found the checkpoint {show(text)}", expected)
    raise BadValue(f"found {show(text)}", "a .safetensors, .pt or .pth file")


def is_file_of_weights(value: str) -> bool:
    """Whether `model.weights` is a file, not the name of a torchvision weights entry."""
    return value.endswith(WEIGHTS_SUFFIXES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The parts of `model.source`."""

    scheme: str  # torchvision | timm | transformers | python | exported
    target: str  # name of a model, or a path
    factory: str | None = None  # python only: the function that makes the module

    @property
    def local(self) -> bool:
        """Whether `target` is a path."""
        return self.scheme not in _NAMES

    def __str__(self) -> str:
        return f"{self.scheme}:{self.target}" + (f":{self.factory}" if self.factory else "")


def parse_source(text: str, base: Path | None = None) -> Source:
    """Take `model.source` apart; a relative path in it is relative to `base`. Raises BadValue."""
    scheme, _, target = text.partition(":")
    bad = BadValue(f"found {show(text)}", SOURCE_EXPECTED)
    if scheme in _NAMES:
        if not _NAMES[scheme].fullmatch(target):
            raise bad
        return Source(scheme=scheme, target=target)
    if scheme not in ("transformers", "python", "exported") or not target:
        raise bad
    factory: str | None = None
    if scheme == "python":
        target, _, factory = target.rpartition(":")
        if not target.endswith(".py") or not factory.isidentifier():
            raise BadValue(f"found {show(text)}", "python:FILE.py:FACTORY")
    if scheme == "exported" and not target.endswith(".pt2"):
        raise BadValue(f"found {show(text)}", "exported:FILE.pt2")
    return Source(scheme=scheme, target=absolute(target, base), factory=factory)
