"""Computes the values for the columns of a spec from a model's outputs, on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from nimble_jobs.errors import ModelError

_FROM_LOGITS = {"top1", "top5", "probability", "logits"}
_NOT_OUTPUTS = {"id", "label"}
_TOP = 5


@dataclass(frozen=True)
class Heads:
    """The values for `output.fields`, by field: top1 int64 [n], top5 int64 [n, 5], probability float32 [n].

    Logits and other outputs stay as the model returns them. Of classes with equal scores, the first one counts.
    """

    fields: tuple[str, ...]

    @classmethod
    def of(cls, fields: Sequence[str]) -> Heads:
        """The heads for the fields that depend on outputs."""
        return cls(tuple(field for field in fields if field not in _NOT_OUTPUTS))

    def __call__(self, outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The values by field. Raises ModelError for a field that the model does not return."""
        made: dict[str, torch.Tensor] = {}
        logits = logits_of(outputs) if _FROM_LOGITS & set(self.fields) else None
        scores = None if logits is None else logits.float()
        for field in self.fields:
            if field in _FROM_LOGITS:
                assert logits is not None
                assert scores is not None
                made[field] = _of_scores(field, logits, scores)
            elif field in outputs:
                made[field] = outputs[field]
            else:
                raise ModelError(f"output.fields: the model returns no {field!r}; it returns {', '.join(outputs)}")
        return made


def logits_of(outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The class scores, shape (batch, classes): `logits`, `output`, or the first output of that shape."""
    for name in ("logits", "output"):
        if name in outputs and outputs[name].dim() == 2:
            return outputs[name]
    for tensor in outputs.values():
        if tensor.dim() == 2 and tensor.is_floating_point():
            return tensor
    shapes = ", ".join(f"{n} {list(t.shape)}" for n, t in outputs.items())
    raise ModelError(
        "output.fields: top1, top5, probability and logits need scores of shape [batch, classes]; "
        f"the model returns {shapes}"
    )


def _of_scores(field: str, logits: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    match field:
        case "top1":
            return scores.argmax(dim=1)
        case "top5":
            return scores.sort(dim=1, descending=True, stable=True).indices[:, :_TOP].contiguous()
        case "probability":  # of the largest: 1 over the sum of what each is of it
            return 1.0 / (scores - scores.amax(dim=1, keepdim=True)).exp().sum(dim=1)
        case _:
            return logits
