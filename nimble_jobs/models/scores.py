"""Which of a model's outputs are its class scores."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

_OTHERS = ("pooler_output", "embedding", "start_logits", "end_logits", "image_embeds", "text_embeds")


def scores_among(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The outputs that may be class scores, shape (batch, classes): `logits` or `output` alone, else all that can be
    meant.
    """
    for name in ("logits", "output"):
        if name in outputs and not outputs[name].is_nested and outputs[name].dim() == 2:
            return {name: outputs[name]}
    return {n: t for n, t in outputs.items() if n not in _OTHERS and t.is_floating_point() and t.dim() == 2}
