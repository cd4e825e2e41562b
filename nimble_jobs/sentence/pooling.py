"""How the vectors of a text's tokens become one vector, as a value that can be written into a key."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

# Ways to pool, by the names that sentence-transformers gives them, in the order in which it joins several.
MODES = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")  # classes of torch.nn


@dataclass(frozen=True, kw_only=True)
class Dense:
    """A linear layer over the pooled vector."""

    folder: str  # of its weights, relative to the model's folder
    in_features: int
    out_features: int
    bias: bool
    activation: str  # one of ACTIVATIONS
    residual: bool = False  # adds its own input, through a second layer if the sizes differ


@dataclass(frozen=True, kw_only=True)
class Pooling:
    """Pools, applies linear layers, and scales the vector to length 1, in this order."""

    modes: tuple[str, ...]  # values of MODES; the vectors of several are joined
    layers: tuple[Dense, ...] = ()
    normalize: bool = False

    @property
    def words(self) -> str:
        """All of it, as canonical JSON: equal for two folders that compute the same, whatever their weights."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def of_words(cls, words: str) -> Pooling:
        """The value whose `words` these are. Raises ValueError for other text."""
        try:
            raw: dict[str, Any] = json.loads(words)
            layers = tuple(Dense(**layer) for layer in raw["layers"])
            return cls(modes=tuple(raw["modes"]), layers=layers, normalize=raw["normalize"])
        except (TypeError, KeyError) as e:
            raise ValueError(f"{words!r} is no pooling") from e
