"""The features under a model's last linear layer, as one more output."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nimble_jobs.errors import ModelError


class _Seen:
    """A hook that keeps a layer's inputs. It is copied with its module, which a function would not be."""

    def __init__(self) -> None:
        self.inputs: list[torch.Tensor] = []

    def __call__(self, _module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self.inputs.append(args[0])


class WithEmbedding(nn.Module):
    """Calls a model and returns a dict of its own outputs and `embedding`, the input of its last `nn.Linear`.

    Raises ModelError for a model without a linear layer.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
        if not linear:
            raise ModelError("output.fields: embedding needs a model that ends in a linear layer; this one has none")
        self.model = model
        self._seen = _Seen()
        linear[-1].register_forward_pre_hook(self._seen)
        self.train(model.training)

    def forward(self, *inputs: Any, **named: Any) -> dict[str, Any]:
        """The model's own outputs, and `embedding` [batch, features] in the model's dtype."""
        self._seen.inputs.clear()
        output = self.model(*inputs, **named)
        outputs = output if isinstance(output, dict) else {"output": output}
        embedding = self._seen.inputs[-1]
        self._seen.inputs.clear()
        return {**outputs, "embedding": embedding}
