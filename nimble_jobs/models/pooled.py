"""One vector for each text, from the vectors of its tokens, as one more output of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as everybody calls it

from nimble_jobs.errors import ModelError
from nimble_jobs.models.weights import load_weights
from nimble_jobs.sentence import Dense, Pooling

MASK = "attention_mask"
_TOKENS = ("last_hidden_state", "token_embeddings")  # names that models give to the vectors of tokens
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


class Pooled(nn.Module):
    """Calls a model with keyword arguments, and adds `embedding`, float32 [batch, features], to its outputs.

    Only positions where `attention_mask` [batch, tokens] is not 0 count. All others are left out by selection, not by
    a product, so that NaN in them changes nothing. A text without tokens gets zeros. The arithmetic is float32 for
    models of every dtype.
    """

    def __init__(self, model: nn.Module, pooling: Pooling, folder: Path | None = None) -> None:
        """`folder` has the weights of `pooling.layers`. Raises ModelError if they are missing or do not fit."""
        super().__init__()
        self.model = model
        self.pooling = pooling
        self.layers = nn.ModuleList(_Layer(dense, folder) for dense in pooling.layers)
        self.train(model.training)

    def forward(self, *args: Tensor, **inputs: Tensor) -> dict[str, Any]:
        """The model's own outputs, and `embedding`. Raises ModelError for a model that has no vectors of tokens."""
        mask = inputs.get(MASK)
        if mask is None:
            raise ModelError(f"output.pooling: the model gets no {MASK}; expected input.format: text")
        output = self.model(*args, **inputs)
        named = output if isinstance(output, dict) else {"output": output}
        vectors = _token_vectors(named, mask)
        pooled = torch.cat([pool(vectors, mask, mode) for mode in self.pooling.modes], dim=-1)
        for layer in self.layers:
            pooled = layer(pooled)
        if self.pooling.normalize:
            pooled = F.normalize(pooled, dim=-1)
        return {**named, "embedding": pooled}


def pool(vectors: Tensor, mask: Tensor, mode: str) -> Tensor:
    """float32 [batch, features] of vectors [batch, tokens, features] at the positions that the mask keeps.

    `mode`: mean, cls (the first one kept), last (the last one kept), max, mean_sqrt (their sum over the root of their
    number) or weighted_mean (each counts as often as its place among them says: 1, 2, 3, ...).
    """
    kept = mask != 0
    there = kept.any(dim=1, keepdim=True)
    if mode in ("cls", "last"):
        places = torch.arange(mask.shape[1], device=mask.device)
        if mode == "cls":
            at = torch.where(kept, places, mask.shape[1]).amin(dim=1).clamp(max=mask.shape[1] - 1)
        else:
            at = torch.where(kept, places, 0).amax(dim=1)
        chosen = vectors.gather(1, at.view(-1, 1, 1).expand(-1, 1, vectors.shape[2])).squeeze(1)
        return torch.where(there, chosen.float(), 0.0)
    wide, column = vectors.float(), kept.unsqueeze(-1)
    if mode == "max":
        return torch.where(there, torch.where(column, wide, -torch.inf).amax(dim=1), 0.0)
    weights = kept.float()
    if mode == "weighted_mean":
        weights = torch.where(kept, kept.to(torch.int32).cumsum(dim=1), 0).float()
        wide = wide * weights.unsqueeze(-1)
    total = torch.where(column, wide, 0.0).sum(dim=1)
    count = weights.sum(dim=1, keepdim=True).clamp(min=1.0)
    return total / (count.sqrt() if mode == "mean_sqrt" else count)


class _Layer(nn.Module):
    """A linear layer of the folder, float32, with its activation."""

    def __init__(self, dense: Dense, folder: Path | None) -> None:
        super().__init__()
        self.linear = nn.Linear(dense.in_features, dense.out_features, bias=dense.bias)
        self.residual = None
        if dense.residual and dense.in_features != dense.out_features:
            self.residual = nn.Linear(dense.in_features, dense.out_features, bias=False)
        self.adds_input = dense.residual
        place = (folder or Path()) / dense.folder
        file = next((place / name for name in _WEIGHTS if (place / name).is_file()), None)
        if file is None:
            raise ModelError(f"{place}: there are no weights of the Dense layer; expected {' or '.join(_WEIGHTS)}")
        load_weights(self, file)
        self.activation = getattr(nn, dense.activation)()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.activation(self.linear(x))
        if self.adds_input:
            made = made + (x if self.residual is None else self.residual(x))
        return made


def _token_vectors(outputs: dict[str, Any], mask: Tensor) -> Tensor:
    """[batch, tokens, features]: the output of a known name, or else the first of that shape."""
    shape = tuple(mask.shape)
    for name in (*_TOKENS, *outputs):
        found = outputs.get(name)
        if isinstance(found, Tensor) and found.dim() == 3 and found.shape[:2] == shape and found.is_floating_point():
            return found
    shapes = ", ".join(f"{n} {list(t.shape)}" for n, t in outputs.items() if isinstance(t, Tensor))
    raise ModelError(
        f"output.pooling: needs a vector for each token, [batch, tokens, features]; the model returns {shapes}"
    )
