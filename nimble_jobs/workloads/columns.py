"""The columns of a shard, collected batch by batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from nimble_jobs.errors import DataError, ModelError


class Columns:
    """Collects the columns of one shard."""

    def __init__(self, fields: Sequence[str], names: Sequence[str] = ()) -> None:
        """`names` of the classes, for top1_label."""
        self._fields = tuple(fields)
        self._names = tuple(names)
        self._parts: dict[str, list[np.ndarray | list[str]]] = {f: [] for f in fields}

    def add(self, made: Mapping[str, torch.Tensor], ids: list[str], labels: np.ndarray | None) -> None:
        """Add the first len(ids) rows of each field that `Heads` made; the rest is padding.

        Raises ModelError for a field that does not have one row per record, DataError if the input has no labels.
        """
        for field in self._fields:
            if field == "id":
                self._parts[field].append(ids)
            elif field == "label":
                if labels is None:
                    raise DataError("output.fields: label needs input.fields.label; the input has no labels")
                self._parts[field].append(labels)
            elif field == "top1_label" and self._names:
                classes = _rows(made[field], len(ids))
                self._parts[field].append([self._names[i] for i in classes.tolist()])
            else:
                self._parts[field].append(_rows(made[field], len(ids)))

    def finish(self) -> dict[str, np.ndarray | list[str]]:
        """The columns, whole."""
        return {
            field: [i for part in parts for i in part]
            if isinstance(parts[0], list)
            else np.concatenate([np.asarray(p) for p in parts])
            for field, parts in self._parts.items()
            if parts
        }


def _rows(tensor: torch.Tensor, rows: int) -> np.ndarray:
    """A copy of the first rows: the tensor's memory will be overwritten."""
    if tensor.dim() == 0 or tensor.shape[0] < rows:
        raise ModelError(
            f"the model returns shape {list(tensor.shape)} for a batch of records; expected one row per record"
        )
    if tensor.dtype == torch.bfloat16:
        return tensor[:rows].float().numpy()
    array = tensor.numpy()[:rows]  # numpy keeps the interpreter's lock for copies this small
    return array.astype(np.float32 if array.dtype == np.float16 else array.dtype)
