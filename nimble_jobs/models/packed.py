"""A model with several inputs, called with rows of bytes that hold one record each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nimble_jobs.models.call_arguments import Call
from nimble_jobs.models.preprocessed import MASKS, Preprocessed, crossing_name
from nimble_jobs.packing import Layout, Part


class Packed(nn.Module):
    """Takes rows uint8 [n, layout.nbytes], takes them apart, and calls the model with one tensor for each part.

    A part with a preprocessing gets it here. Floating parts take the model's dtype, whole numbers become int64. The
    model keeps the names of its weights below `model`.
    """

    def __init__(
        self, model: nn.Module, layout: Layout, dtype: torch.dtype, device: torch.device, call: Call | None = None
    ) -> None:
        """`dtype` is the type of the model's floating inputs, `call` how it is called if not as the paths say."""
        super().__init__()
        self._call = Call.of_paths([part.path for part in layout.parts]) if call is None else call
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
        positional, named = self._call.filled(arguments)
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
