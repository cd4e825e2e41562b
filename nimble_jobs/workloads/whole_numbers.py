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
from nimble_jobs.device_errors import text_of
from nimble_jobs.engine.private.modes import DispatchMode
from nimble_jobs.errors import DataError, NimbleError, first_line
from nimble_jobs.models.build import DTYPES
from nimble_jobs.spec import JobSpec

log = logging.getLogger(__name__)

# What torch says of an input of whole numbers beside weights that are fractions. Of labels and indexes it says other
# things, such as "Found dtype Long but expected Float" and "expected scalar type Long but found Float".
_OF_TYPES = re.compile(
    "|".join(
        (
            r"must have the same dtype, but got (Long|long int|int64)\b",
            r"to have the same dtype, but got: (long int|.* != long int)",
            r"Input type \((long int|.*LongT\w+)\) and",
            r"scalar type \w+ but found Long\b",
            r"not implemented for 'Long'",
            r"Input dtype must be .*Got: Long\b",
            r"Type promoting not supported\. Got Long\b",
            r"RNN input dtype \(torch\.int64\)",
            r"^mixed dtype",
        )
    )
)
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


class _Mixed(RuntimeError):
    """What `OneType` raises."""


class OneType(DispatchMode):
    """While inside, products of whole numbers and fractions raise RuntimeError on the meta device, too."""

    supports_higher_order_operators = True  # they are let through

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        if name in _OF_ONE_TYPE:
            given = {arg.dtype for arg in args if isinstance(arg, torch.Tensor)}
            if len({dtype.is_floating_point for dtype in given if not dtype.is_complex}) == 2:
                names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in given))
                raise _Mixed(f"{name.removeprefix('aten::')} of {names}")
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
    of_torch = isinstance(error, (RuntimeError, ValueError)) and not isinstance(error, NimbleError)
    if not of_torch or not (isinstance(error, _Mixed) or _OF_TYPES.search(text_of(error))):
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
