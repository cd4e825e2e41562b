"""`timm:NAME`: any model that timm registers. timm is an extra."""

from __future__ import annotations

import contextlib
import importlib.util
from typing import Any

from torch import nn

from nimble_jobs.errors import ModelError
from nimble_jobs.models.arguments import called
from nimble_jobs.models.identity import missing_package
from nimble_jobs.models.source import similar
from nimble_jobs.models.undrawn import Undrawn

# These would load a checkpoint of their own, by download or without the checks of model.weights.
_LOADING = ("pretrained", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")


def build(name: str, args: dict[str, Any], *, drawn: bool = True) -> nn.Module:
    """timm's model with random weights. Without `drawn`, parameters may hold anything, since all of them are loaded
    afterwards. Raises ModelError, also when timm is not installed.
    """
    if importlib.util.find_spec("timm") is None:
        raise ModelError(missing_package("timm"))
    import timm

    if ":" in name or not timm.is_model(name):  # a colon would name a hub or a folder
        raise ModelError(f"model.source: timm has no model {name!r}{similar(name, timm.list_models())}")
    for key in _LOADING:
        if args.get(key):
            raise ModelError(f"model.args.{key}: weights are chosen by model.weights")
    with contextlib.nullcontext() if drawn else Undrawn():
        return called(timm.create_model, {**args, "model_name": name}, f"timm:{name}", args)
