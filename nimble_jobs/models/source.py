"""The parts of `model.source` and `model.weights`, read without torch."""

from __future__ import annotations

import difflib
from pathlib import Path

from nimble_jobs.errors import ModelError
from nimble_jobs.spec.model import ModelSpec
from nimble_jobs.spec.paths import Source, is_file_of_weights, parse_source
from nimble_jobs.spec.units import BadValue


def source_of(spec: ModelSpec) -> Source:
    """The parts of `model.source`. Raises ModelError if it is incomplete."""
    try:
        return parse_source(spec.source)
    except BadValue as e:
        raise ModelError(f"model.source: {e}") from e


def weights_file(spec: ModelSpec) -> Path | None:
    """The weights file that the spec names, or None when it names no file."""
    return Path(spec.weights) if spec.weights is not None and is_file_of_weights(spec.weights) else None


def weights_entry(spec: ModelSpec) -> str | None:
    """The torchvision weights entry that the spec names (`DEFAULT`, `IMAGENET1K_V2`), or None."""
    if spec.weights is None or is_file_of_weights(spec.weights):
        return None
    if source_of(spec).scheme != "torchvision":
        raise ModelError(
            f"model.weights: there is no file {spec.weights!r}; only torchvision models have named weights"
        )
    return spec.weights


def similar(word: str, words: list[str]) -> str:
    """`; did you mean A, B?` for the words that look alike, else an empty string."""
    close = difflib.get_close_matches(word, words, n=3)
    return f"; did you mean {', '.join(close)}?" if close else ""
