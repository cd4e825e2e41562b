"""`torchvision:NAME`: any model that torchvision registers."""

from __future__ import annotations

import contextlib
import inspect
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchvision.models import get_model_builder, get_model_weights, list_models

from nimble_jobs.errors import ModelError
from nimble_jobs.models.arguments import called
from nimble_jobs.models.download import download
from nimble_jobs.models.source import similar
from nimble_jobs.models.undrawn import Undrawn
from nimble_jobs.models.weights import read_weights

_HASH_IN_NAME = re.compile(r"-([a-f0-9]+)\.")  # torchvision's files have the beginning of their SHA-256 in their names
# Their own initialisation without `init_weights` is announced to change, and makes deep random activations overflow
# fp16. Theirs are the only builders that neither scale random weights nor say so.
_UNSCALED = ("googlenet", "inception_v3")


def build(name: str, args: dict[str, Any], entry: str | None, *, drawn: bool = True) -> nn.Module:
    """Call the builder with `args`. `entry` names torchvision weights, which are kept in the local torch hub folder.

    Without `drawn`, parameters may hold anything, since all of them are loaded afterwards. Random weights of googlenet
    and inception_v3 follow He et al. 2015 unless `init_weights` is given. Backbone weights are never downloaded. Raises
    ModelError.
    """
    builder = _builder(name)
    for key in ("weights", "pretrained", "weights_backbone", "pretrained_backbone"):
        if args.get(key):
            raise ModelError(f"model.args.{key}: weights are chosen by model.weights, for the whole model")
    chosen = {**args, "progress": False}
    if "weights_backbone" in inspect.signature(builder).parameters:
        chosen["weights_backbone"] = None
    if entry is not None:
        chosen["weights"] = _fetched(name, entry)
    scale = name in _UNSCALED and entry is None and "init_weights" not in args
    if scale:
        chosen["init_weights"] = False
    with contextlib.nullcontext() if drawn and entry is None else Undrawn():
        module: nn.Module = called(builder, chosen, f"torchvision:{name}", args)
    if scale and drawn:
        _he_initialise(module)
    return module


def _builder(name: str) -> Any:
    with contextlib.suppress(ValueError):
        if name == name.lower():  # torchvision takes others, too
            return get_model_builder(name)
    raise ModelError(f"model.source: torchvision has no model {name!r}{similar(name, list_models())}")


def _fetched(name: str, entry: str) -> Any:
    """The weights entry, once its file lies in the hub folder and is known to hold plain tensors only."""
    entries = get_model_weights(name)
    if entry not in entries.__members__:
        known = ", ".join(entries.__members__) or "none"
        raise ModelError(f"model.weights: torchvision has no weights {entry!r} for {name}; it has {known}")
    weights = entries[entry]
    file = Path(torch.hub.get_dir()) / "checkpoints" / weights.url.rsplit("/", 1)[1]
    if not file.is_file():
        try:
            named = _HASH_IN_NAME.search(file.name)
            download(weights.url, file, hash_prefix=named[1] if named else None)
        except OSError as e:  # no network, no room, or bytes that are not what the name promises
            raise ModelError(
                f"model.weights: {entry} of {name} is not in {file.parent} and could not be downloaded ({e}); "
                f"put the file {file.name} there, or let model.weights name a file"
            ) from e
    read_weights(file)
    return weights


def _he_initialise(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(part.weight, nonlinearity="relu")
            if part.bias is not None:
                nn.init.zeros_(part.bias)
