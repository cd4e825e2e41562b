"""From a model's outputs to the columns that a spec asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from nimble_jobs.errors import DataError, ModelError

_FROM_LOGITS = {"top1", "top5", "probability", "logits"}
_TOP = 5


class Columns:
    """Collects the columns of one shard, batch by batch."""

    def __init__(self, fields: Sequence[str]) -> None:
        self._fields = tuple(fields)
        self._parts: dict[str, list[np.ndarray | list[str]]] = {f: [] for f in fields}

    def add(self, outputs: Mapping[str, torch.Tensor], ids: list[str], labels: np.ndarray | None) -> None:
        """Take the first len(ids) rows of each output; what lies behind them is padding.

        Raises ModelError for a field that the model does not return, DataError for labels that the input has not.
        """
        rows = len(ids)
        logits = _host(logits_of(outputs), rows) if _FROM_LOGITS & set(self._fields) else np.empty(0)
        for field in self._fields:
            self._parts[field].append(_column(field, outputs, logits, ids, labels, rows))

    def finish(self) -> dict[str, np.ndarray | list[str]]:
        """The columns, whole."""
        return {
            field: [i for part in parts for i in part]
            if field == "id"
            else np.concatenate([np.asarray(p) for p in parts])
            for field, parts in self._parts.items()
            if parts
        }


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


def _column(
    field: str,
    outputs: Mapping[str, torch.Tensor],
    logits: np.ndarray,
    ids: list[str],
    labels: np.ndarray | None,
    rows: int,
) -> np.ndarray | list[str]:
    match field:
        case "id":
            return ids
        case "label":
            if labels is None:
                raise DataError("output.fields: label needs input.fields.label; the input has no labels")
            return labels
        case "top1":
            return np.asarray(logits.argmax(axis=1))
        case "top5":
            return np.argsort(-logits, axis=1, kind="stable")[:, :_TOP]
        case "probability":
            return _largest_softmax(logits)
        case "logits":
            return logits
        case _:
            if field not in outputs:
                raise ModelError(f"output.fields: the model returns no {field!r}; it returns {', '.join(outputs)}")
            return _host(outputs[field], rows)


def _largest_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(1.0 / np.exp(shifted).sum(axis=1), dtype=np.float32)


def _host(tensor: torch.Tensor, rows: int) -> np.ndarray:
    if tensor.dim() == 0 or tensor.shape[0] < rows:
        raise ModelError(
            f"the model returns shape {list(tensor.shape)} for a batch of records; expected one row a record"
        )
    found = tensor[:rows].detach()
    if found.dtype in (torch.float16, torch.bfloat16):
        found = found.float()
    return found.to("cpu", copy=True).numpy()
