"""The parts of `model.source` and `model.weights`, read without torch."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from nimble_jobs.errors import ModelError
from nimble_jobs.spec.model import ModelSpec

_WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")


class Kind(StrEnum):
    """Where a model comes from."""

    TORCHVISION = "torchvision"
    TIMM = "timm"
    TRANSFORMERS = "transformers"
    PYTHON = "python"
    EXPORTED = "exported"


@dataclass(frozen=True, kw_only=True)
class Source:
    """One parsed `model.source`."""

    kind: Kind
    name: str  # of the model, or of the factory; "" where the path says all
    path: Path | None = None  # file or folder of python, exported and transformers sources

    @property
    def file(self) -> Path:
        """The path of a source that has one."""
        assert self.path is not None
        return self.path


def parse(text: str) -> Source:
    """Split `KIND:REST`. Raises ModelError when a part is missing or the kind is unknown."""
    head, _, rest = text.partition(":")
    try:
        kind = Kind(head)
    except ValueError:
        expected = ", ".join(k.value for k in Kind)
        raise ModelError(f"model.source: {text!r}: unknown kind {head!r}; expected one of {expected}") from None
    if kind is Kind.PYTHON:
        file, _, factory = rest.rpartition(":")
        if not file.endswith(".py") or not factory.isidentifier():
            raise ModelError(f"model.source: {text!r} is not complete; expected python:FILE.py:FACTORY")
        return Source(kind=kind, name=factory, path=Path(file))
    if not rest:
        raise ModelError(f"model.source: {text!r} is not complete; expected something after {head}:")
    if kind in (Kind.TRANSFORMERS, Kind.EXPORTED):
        return Source(kind=kind, name="", path=Path(rest))
    return Source(kind=kind, name=rest.lower() if kind is Kind.TORCHVISION else rest)


def weights_file(spec: ModelSpec) -> Path | None:
    """The weights file that the spec names, or None when it names no file."""
    if spec.weights is None or weights_entry(spec) is not None:
        return None
    return Path(spec.weights)


def weights_entry(spec: ModelSpec) -> str | None:
    """The torchvision weights entry that the spec names (`DEFAULT`, `IMAGENET1K_V2`), or None."""
    text = spec.weights
    if text is None or "/" in text or text.endswith(_WEIGHT_SUFFIXES):
        return None
    if parse(spec.source).kind is not Kind.TORCHVISION:
        raise ModelError(f"model.weights: {text!r} is no file; only torchvision models have named weights")
    return text


def similar(word: str, words: list[str]) -> str:
    """`; did you mean A, B?` for the words that look alike, else an empty string."""
    close = difflib.get_close_matches(word, words, n=3)
    return f"; did you mean {', '.join(close)}?" if close else ""
