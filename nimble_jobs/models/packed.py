"""A model with several inputs, called with rows of bytes that hold one record each."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nimble_jobs.errors import ModelError
from nimble_jobs.models.preprocessed import MASKS, Preprocessed, crossing_name
from nimble_jobs.packing import Layout, Part


class Packed(nn.Module):
    """Takes rows uint8 [n, layout.nbytes], takes them apart, and calls the model with one tensor for each part.

    A part with a preprocessing gets it here. Floating parts take the model's dtype, whole numbers become int64. The
    model keeps the names of its weights below `model`.
    """

    def __init__(self, model: nn.Module, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        """`dtype` is the type of the model's floating inputs."""
        super().__init__()
        self.model = model
        self.layout = layout
        self._dtype = dtype
        self.steps = nn.ModuleList(
            nn.Identity() if part.preprocess is None else Preprocessed(nn.Identity(), part.preprocess, dtype, device)
            for part in layout.parts
        )
        self.train(model.training)

    def forward(self, rows: torch.Tensor) -> Any:
        """The model's own outputs."""
        return self.call(self.arguments(rows))

    def call(self, arguments: Mapping[str, torch.Tensor]) -> Any:
        """The model's outputs for arguments by path."""
        positional, named = nested(arguments)
        return self.model(*positional, **named)

    def arguments(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the model is given, by path: each [n, *part.result]."""
        found = {}
        for part, step in zip(self.layout.parts, self.steps, strict=True):
            x = self._stored(rows, part)
            found[part.path] = step(x) if part.preprocess is not None else self._given(x, part)
        return found

    def _stored(self, rows: torch.Tensor, part: Part) -> torch.Tensor:
        """The part's own bytes as [n, *part.stored], a view of the rows in the type that torch has for them."""
        kind = getattr(torch, crossing_name(part.dtype))
        begin = self.layout.offset(part.path)
        x = rows[:, begin : begin + kind.itemsize * math.prod(part.stored)].view(kind)
        return x.unflatten(1, part.stored) if part.stored else x[:, 0]

    def _given(self, x: torch.Tensor, part: Part) -> torch.Tensor:
        if part.is_made:
            places = torch.arange(part.shape[0], dtype=x.dtype, device=x.device)
            lengths = x.unsqueeze(1)
            x = places < lengths if part.make == "mask_right" else places >= part.shape[0] - lengths
        elif part.dtype in MASKS:
            wide, mask = MASKS[part.dtype]
            x = x.to(wide) & mask
        kind = {"float": self._dtype, "integer": torch.int64, "bool": torch.bool}[part.gives]
        # Contiguous, as a tensor of the caller's would be: rows lie `nbytes` apart.
        return x.to(kind).contiguous()


def nested(arguments: Mapping[str, torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """Positional and named arguments of dotted paths. Entries with positions make a list, others a dict."""
    tree: dict[str, Any] = {}
    for path, tensor in arguments.items():
        *outer, last = path.split(".")
        inside = tree
        for name in outer:
            inside = inside.setdefault(name, {})
        inside[last] = tensor
    made = {name: _listed(value) for name, value in tree.items()}
    count = sum(name.isdigit() for name in made)
    return [made.pop(str(i)) for i in range(count)], made


def _listed(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    made = {name: _listed(entry) for name, entry in value.items()}
    return [made[str(i)] for i in range(len(made))] if next(iter(made)).isdigit() else made


def check_arguments(model: nn.Module, paths: Sequence[str]) -> None:
    """Raises ModelError unless a call of the model can be given arguments with these paths.

    Models whose code does not say what they take are not checked.
    """
    signature = signature_of(model)
    if signature is None:
        return
    first = list(dict.fromkeys(path.split(".")[0] for path in paths))
    names = [name for name in first if not name.isdigit()]
    takes = signature.parameters.values()
    known = [p.name for p in takes if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    open_names = any(p.kind is p.VAR_KEYWORD for p in takes)
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None and not open_names:
        raise ModelError(
            f"input.fields.x.{unknown}: the model takes no such argument; expected some of: {_said(takes)}"
        )
    try:
        signature.bind(*[None] * (len(first) - len(names)), **dict.fromkeys(names))
    except TypeError as e:
        raise ModelError(f"input.fields.x: the model cannot be called so: {e}; it takes: {_said(takes)}") from e


def signature_of(model: nn.Module) -> inspect.Signature | None:
    """What the model's forward takes; None if its code does not say."""
    try:
        return inspect.signature(model.forward)
    except (TypeError, ValueError):
        return None


def _said(parameters: Any) -> str:
    said = [
        p.name + (" (required)" if p.default is p.empty else "")
        for p in parameters
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    return ", ".join(said) or "nothing"
