"""Texts to embed, in a Parquet file: real English whose lengths follow a log-normal law, as those of real corpora do.

Each text is a run of consecutive paragraphs out of documentation, cut after a number of words that is drawn. So words,
punctuation and sentences are those of life, and a tokenizer splits them as it would in life.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nimble_jobs.bench.text.prose import PACKAGES, passages
from nimble_jobs.errors import UsageError

_LEAST_WORDS = 3
_ROWS = 1024  # a row group of the file


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What decides the texts, beside the versions of the packages that they come from."""

    count: int
    median_words: float = 60.0
    sigma: float = 0.9  # standard deviation of the natural logarithm of the number of words
    most_words: int = 1000
    seed: int = 0
    packages: tuple[str, ...] = PACKAGES

    @property
    def name(self) -> str:
        """The name of the file."""
        digest = hashlib.sha256(repr(self).encode()).hexdigest()
        return f"texts-{self.count}-{digest[:8]}.parquet"


def provide(folder: Path, recipe: Recipe, told: Callable[[str], None]) -> Path:
    """The file of a recipe, with columns `id` and `text`; made if it is missing. Raises UsageError without sources."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / recipe.name
    if path.exists():
        return path
    told(f"making {recipe.count:,} texts in {path}")
    words = [passage.text.split() for package in recipe.packages for passage in passages(package)]
    if not words:
        raise UsageError(f"no texts: none of {', '.join(recipe.packages)} has docstrings here")
    texts = made(recipe, words)
    table = pa.table({"id": [f"text-{number:07d}" for number in range(len(texts))], "text": texts})
    partial = path.with_suffix(".partial")
    pq.write_table(table, partial, row_group_size=_ROWS)
    partial.replace(path)
    return path


def made(recipe: Recipe, passages: Sequence[Sequence[str]]) -> list[str]:
    """The texts, from passages that are lists of words. The same recipe and passages give the same texts."""
    draw = np.random.default_rng(recipe.seed)
    lengths = np.exp(draw.normal(math.log(recipe.median_words), recipe.sigma, recipe.count))
    wanted = np.clip(np.rint(lengths), _LEAST_WORDS, recipe.most_words).astype(int)
    starts = draw.integers(0, len(passages), recipe.count)
    return [_text(passages, int(start), int(count)) for start, count in zip(starts, wanted, strict=True)]


def _text(passages: Sequence[Sequence[str]], start: int, count: int) -> str:
    words: list[str] = []
    while len(words) < count:
        words += passages[start % len(passages)]
        start += 1
    return " ".join(words[:count])


def facts(path: Path, recipe: Recipe) -> dict[str, Any]:
    """What the environment of a result says about the texts."""
    return {"file_sha256": hashlib.sha256(path.read_bytes()).hexdigest(), **asdict(recipe)}
