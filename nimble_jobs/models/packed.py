"""A model with several inputs, called with rows of bytes that hold one record each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nimble_jobs.models.call_arguments import Call
from nimble_jobs.models.preprocessed import MASKS, Preprocessed, crossing_name, memory_format, shown_layout
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
        self.steps = nn.ModuleList(_Argument(layout, part, dtype, device) for part in layout.parts)
        self._paths = tuple(part.path for part in layout.parts)
        self._laid_out = shown_layout(model)
        for module in (self, *self.steps.modules()):
            module.training = model.training  # and nothing of the model's

    def packed_as(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> Packed:
        """The same model for rows of another layout with the same arguments."""
        return Packed(self.model, layout, dtype, device, self._call)

    def forward(self, rows: torch.Tensor) -> Any:
        """The model's own outputs."""
        return self.call(self.arguments(rows))

    def call(self, arguments: Mapping[str, torch.Tensor]) -> Any:
        """The model's outputs for arguments by path."""
        positional, named = self._call.filled(arguments)
        return self.model(*positional, **named)

    def arguments(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the model is given, by path: each [n, *part.result]. Images lie in the memory format of its weights."""
        layout = memory_format(self.model, self._laid_out)
        found = {}
        for path, step in zip(self._paths, self.steps, strict=True):
            x = step(rows)
            found[path] = x.to(memory_format=layout) if x.dim() == 4 and step.is_image else x
        return found


def packed_in(module: nn.Module) -> Packed | None:
    """The module if it takes rows of several inputs, else the one that does so below nothing but wrappers."""
    while not isinstance(module, Packed):
        children = list(module.children())
        if len(children) != 1:
            return None
        module = children[0]
    return module


class _Argument(nn.Module):
    """Makes one argument [n, *part.result] of rows. It knows its part as plain numbers, for the sake of compilers."""

    def __init__(self, layout: Layout, part: Part, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._stored = part.stored
        self._kind: torch.dtype = getattr(torch, crossing_name(part.dtype))
        self._begin = layout.offset(part.path)
        self._end = self._begin + self._kind.itemsize * math.prod(part.stored)
        self._make, self._length = part.make, part.shape[0] if part.is_made else 0
        self._mask = MASKS.get(part.dtype)
        self._given = {"float": dtype, "integer": torch.int64, "bool": torch.bool}[part.gives]
        self.is_image = part.preprocess is not None and part.preprocess.layout is not None
        self.preprocessed: nn.Module | None = None
        if part.preprocess is not None:
            self.preprocessed = Preprocessed(nn.Identity(), part.preprocess, dtype, device)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows` uint8 [n, layout.nbytes]."""
        x = rows[:, self._begin : self._end].view(self._kind)
        x = x.unflatten(1, self._stored) if self._stored else x[:, 0]
        if self.preprocessed is not None:
            made: torch.Tensor = self.preprocessed(x)
            return made
        if self._make != "value":
            places = torch.arange(self._length, dtype=x.dtype, device=x.device)
            lengths = x.unsqueeze(1)
            x = places < lengths if self._make == "mask_right" else places >= self._length - lengths
        elif self._mask is not None:
            wide, mask = self._mask
            x = x.to(wide) & mask
        # Contiguous, as a tensor of the caller's would be: rows lie `nbytes` apart.
        return x.to(self._given).contiguous()
