"""The buffers through which batches of one shape reach the device."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from nimble_jobs.engine.device import able
from nimble_jobs.errors import UsageError


class Lot:
    """One tensor a column, on the host and on the device, each (batch_size, ...)."""

    def __init__(
        self, arrays: Mapping[str, np.ndarray], batch_size: int, device: torch.device, floating: torch.dtype
    ) -> None:
        """`arrays` say shapes and dtypes; `floating` is the dtype of numbers with a fraction. Raises UsageError for a
        dtype that torch lacks.
        """
        self._batch_size = batch_size
        apart = able(device).separate_memory
        self._host: dict[str, torch.Tensor] = {}
        for name, array in arrays.items():
            try:
                dtype = floating if array.dtype.kind == "f" else _native(array.dtype)
            except TypeError as error:
                raise UsageError(f"column {name!r}: found dtype {array.dtype}; expected one that torch has") from error
            shape = (batch_size, *array.shape[1:])
            self._host[name] = torch.zeros(shape, dtype=dtype, pin_memory=apart)
        self.tensors = {n: torch.zeros_like(t, device=device) if apart else t for n, t in self._host.items()}

    def fill(self, arrays: Mapping[str, np.ndarray]) -> int:
        """Bring records to the device; the rest of the batch are copies of the last one. Returns how many there are.

        Raises UsageError if the columns have different lengths.
        """
        lengths = {name: len(array) for name, array in arrays.items()}
        records = next(iter(lengths.values()))
        other = next((name for name, length in lengths.items() if length != records), None)
        if other is not None:
            raise UsageError(f"column {other!r}: found {lengths[other]} records; expected {records}, as in the others")
        for name, array in arrays.items():
            host = self._host[name]
            if records:
                _copy(host[:records], array)
                host[records:] = host[records - 1]
            if self.tensors[name] is not host:
                self.tensors[name].copy_(host)
        return records


def _native(dtype: np.dtype) -> torch.dtype:
    """The dtype of equal numbers in this machine's byte order. Raises TypeError if torch has none."""
    return torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype


def _copy(into: torch.Tensor, array: np.ndarray) -> None:
    """Arrays of Ray are read-only, which torch takes with a warning only."""
    if into.dtype is torch.bfloat16:  # numpy lacks it
        into.copy_(torch.from_numpy(array.astype(np.float32)))
    else:
        np.copyto(into.numpy(), array, casting="same_kind")
