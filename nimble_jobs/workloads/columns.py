"""The columns of a shard, collected batch by batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch

from nimble_jobs.data.ragged import Ragged
from nimble_jobs.data.records import TokenRows
from nimble_jobs.data.writers import Column, Form, check_form, form_of
from nimble_jobs.errors import DataError, ModelError
from nimble_jobs.workloads.heads import LARGEST, RANKS

_FLOAT32 = 4  # bytes
_PER_TOKEN = frozenset({"token_labels", "token_probabilities"})


class Columns:
    """Collects the columns of one shard."""

    def __init__(
        self,
        fields: Sequence[str],
        names: Sequence[str] = (),
        per_token: Collection[str] = (),
        forms: dict[str, tuple[Form, str]] | None = None,
    ) -> None:
        """`names` of the classes, for top1_label and token_labels. `per_token`: outputs with a value for each token.
        `forms` of the values of each field, and whose they are; those that are new are added.
        """
        self._fields = tuple(fields)
        self._forms = {} if forms is None else forms
        self._names = np.array(names, dtype=np.str_)
        self._per_token = _PER_TOKEN | frozenset(per_token)
        self._parts: dict[str, list[Column]] = {f: [] for f in fields}

    def add(
        self,
        made: Mapping[str, torch.Tensor],
        ids: list[str],
        labels: np.ndarray | None,
        tokens: TokenRows | None = None,
        batch_size: int | None = None,
    ) -> dict[str, np.ndarray]:
        """Add the first len(ids) rows of each field that `Heads` made; the rest is padding. `tokens` are of texts.

        `batch_size`: the rows of a full batch, if it has no other number. Returns which rows have NaN or infinity, by
        field; a field that ranks scores has them if its largest score is not finite.

        Raises ModelError for a field that does not have one row per record, or not of the type and shape that it had
        before, and DataError if the input has no labels or is no text.
        """
        not_finite: dict[str, np.ndarray] = {}
        for field in self._fields:
            if field == "id":
                self._parts[field].append(ids)
            elif field == "label":
                if labels is None:
                    raise DataError("output.fields: label needs input.fields.label; the input has no labels")
                self._parts[field].append(labels)
            elif field in made:
                column = self._of_outputs(field, _rows(field, made[field], len(ids), batch_size), tokens)
                form = form_of(column)
                known, whose = self._forms.setdefault(field, (form, "an earlier batch"))
                check_form(field, form, known, "this batch", whose)
                self._parts[field].append(column)
                not_finite[field] = _not_finite(column)
            else:
                self._parts[field].append(_of_text(field, tokens))
        if LARGEST in made:
            largest = _rows(LARGEST, made[LARGEST], len(ids), batch_size)
            ranked = next(field for field in RANKS if field in self._fields)
            per_token = tokens if largest.ndim == 2 else None
            not_finite[ranked] = _not_finite(Ragged.trimmed(largest, per_token.lengths) if per_token else largest)
        return {field: rows for field, rows in not_finite.items() if len(rows)}

    def finish(self) -> dict[str, Column]:
        """The columns, whole. They are kept no longer."""
        return {field: _joined(self._parts.pop(field)) for field in list(self._parts) if self._parts[field]}

    def _of_outputs(self, field: str, rows: np.ndarray, tokens: TokenRows | None) -> Column:
        if field == "top1_label" and len(self._names):
            return list(self._names[rows].tolist())
        if field not in self._per_token or tokens is None:
            return rows
        column = Ragged.trimmed(rows, tokens.lengths)
        return Ragged(self._names[column.values], column.lengths) if field == "token_labels" else column


def _of_text(field: str, tokens: TokenRows | None) -> Column:
    found = {"token_count": tokens.lengths, "tokens": tokens.ids, "offsets": tokens.offsets}[field] if tokens else None
    if found is None:
        raise DataError(f"output.fields: {field} needs texts; the input has none")
    return found


def _joined(parts: Sequence[Column]) -> Column:
    first = parts[0]
    if isinstance(first, Ragged):
        return Ragged.joined([part for part in parts if isinstance(part, Ragged)])
    if isinstance(first, list):
        return [text for part in parts for text in part]  # type: ignore[misc]  # all parts are lists of text
    return np.concatenate([np.asarray(part) for part in parts])


def _not_finite(column: Column) -> np.ndarray:
    """The rows with NaN or infinity, int64."""
    values = column.values if isinstance(column, Ragged) else column
    if not isinstance(values, np.ndarray) or values.dtype.kind != "f":
        return np.empty(0, dtype=np.int64)
    finite = np.isfinite(values)
    if finite.all():
        return np.empty(0, dtype=np.int64)
    odd = np.flatnonzero(~finite.reshape(len(values), -1).all(axis=1))
    return np.unique(np.repeat(np.arange(len(column)), column.lengths)[odd]) if isinstance(column, Ragged) else odd


def _rows(field: str, tensor: torch.Tensor, rows: int, batch_size: int | None) -> np.ndarray:
    """A copy of the first rows: the tensor's memory will be overwritten."""
    found = tensor.shape[0] if tensor.dim() else 0
    if found < rows or (batch_size is not None and found not in (rows, batch_size)):
        raise ModelError(
            f"output.fields: {field!r}: the model returns shape {list(tensor.shape)} for a batch of records; "
            "expected one row per record"
        )
    if tensor.is_floating_point() and tensor.itemsize < _FLOAT32 and tensor.dtype != torch.float16:
        return tensor[:rows].float().numpy()
    array = tensor.numpy()[:rows]  # numpy keeps the interpreter's lock for copies this small
    return array.astype(np.float32 if array.dtype == np.float16 else array.dtype)
