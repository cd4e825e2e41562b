"""Whole numbers given to a model that computes with fractions: torch's errors about types, with the remedy.

Whole numbers are not converted by themselves, because ids of tokens and classes must stay whole.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nimble_jobs.data import Reader
from nimble_jobs.engine.private.modes import DispatchMode
from nimble_jobs.errors import DataError, NimbleError, first_line
from nimble_jobs.models.build import DTYPES
from nimble_jobs.spec import JobSpec

log = logging.getLogger(__name__)

_OF_TYPES = re.compile(r"\b(Long|LongTensor|long int|int64)\b|mixed dtype")
_OF_INDEXES = "scalar types: Long"  # an index that the model has made a fraction
# Operators that refuse whole numbers beside fractions on every device but torch's meta device.
_OF_ONE_TYPE = {
    "aten::addbmm",
    "aten::addmm",
    "aten::addmv",
    "aten::baddbmm",
    "aten::bmm",
    "aten::convolution",
    "aten::dot",
    "aten::mm",
    "aten::mv",
    "aten::native_batch_norm",
    "aten::_native_batch_norm_legit_no_training",
}


class OneType(DispatchMode):
    """While inside, products of whole numbers and fractions raise RuntimeError on the meta device, too."""

    supports_higher_order_operators = True  # they are let through

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().partition(".")[0] in _OF_ONE_TYPE:
            given = {arg.dtype for arg in args if isinstance(arg, torch.Tensor)}
            if any(t.is_floating_point for t in given) and any(
                not (t.is_floating_point or t.is_complex) for t in given
            ):
                names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in given))
                raise RuntimeError(f"{func.name().partition('.')[0].removeprefix('aten::')} of {names}")
        return func(*args, **(kwargs or {}))


@contextmanager
def naming_whole_numbers(spec: JobSpec, reader: Reader) -> Iterator[None]:
    """While inside, a model's error about the type of its input becomes a DataError if it was given whole numbers."""
    try:
        yield
    except Exception as e:
        refused = refusal(spec, reader, e)
        if refused is None:
            raise
        log.info("the model's own error", exc_info=e)
        raise DataError(refused) from e


def refusal(spec: JobSpec, reader: Reader, error: Exception) -> str | None:
    """What to say if the error may be due to whole numbers; else None."""
    text = str(error)
    if isinstance(error, NimbleError) or not _OF_TYPES.search(text) or _OF_INDEXES in text:
        return None
    if reader.packing is not None:
        whole = [f"{part.path} {part.dtype}" for part in reader.packing.parts if part.gives != "float"]
        given, remedy = ", ".join(whole), "store them as fractions"
    else:
        signature, remedy = reader.signature, "set input.transform.scale: 1"
        stored = signature.stored or signature.dtype
        given = "" if signature.dtype != "int64" else "int64" if stored == "int64" else f"{stored}, given as int64"
    if not given:
        return None
    computes = str(DTYPES[spec.model.dtype]).removeprefix("torch.")
    return (
        f"input.fields.x: the model computes in {computes} and refuses whole numbers ({given}): {first_line(error)}; "
        f"if it wants fractions, {remedy}"
    )
