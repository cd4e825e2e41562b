"""Named tensors as the bytes of one safetensors file, copied from the device in one piece.

The format (https://github.com/huggingface/safetensors): the length of a JSON header in 8 bytes, the header, the values.
Larger element types come first, so every tensor is aligned without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch

from nimble_jobs.engine.device import able
from nimble_jobs.engine.private.operators import copy_
from nimble_jobs.engine.streams import take_for
from nimble_jobs.errors import ModelError
from nimble_jobs.planner.step.optimizer import seen_as

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


_Lies = tuple[int, torch.dtype, torch.Size, tuple[int, ...]]  # address, type, shape, strides
_Together = dict[tuple[torch.dtype, bool], tuple[list[torch.Tensor], list[torch.Tensor]]]


class Flat:
    """A copy of tensors with fixed names, shapes and types, on their device and on the host.

    On CUDA, `take` copies on the device only. The copy to the host runs on its own stream, beside later work.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """Raises ModelError for a tensor that the format cannot hold."""
        self._device = device
        self._names = sorted(tensors, key=lambda n: (-tensors[n].element_size(), str(tensors[n].dtype), n))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._places: dict[str, tuple[int, int]] = {}
        end = 0
        for name in self._names:
            tensor = tensors[name]
            if tensor.dtype not in _DTYPES or tensor.is_meta or tensor.layout is not torch.strided:
                raise ModelError(f"{name}: is {tensor.dtype}, {tensor.layout}; a checkpoint cannot hold it")
            start, end = end, end + math.prod(tensor.shape) * tensor.element_size()
            self._places[name] = (start, end)
            header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.head = len(text).to_bytes(8, "little") + text
        self._values = torch.empty(end, dtype=torch.uint8, device=device)
        self._views = [
            self._values[slice(*self._places[n])].view(tensors[n].dtype).view(tensors[n].shape) for n in self._names
        ]
        self._host = self._values
        if able(device).asynchronous:
            self._host = torch.empty(end, dtype=torch.uint8, pin_memory=True)
            self._stream = take_for(self, device)
            self._copied = torch.cuda.Event()
        self._sources: list[tuple[torch.Tensor, _Lies]] = []  # of the last copy
        self._together: _Together = {}

    @torch.no_grad()
    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the values that the tensors have after all work that was launched so far.

        This overwrites the copy before it. It is fastest if no tensor was replaced or moved since. Raises ModelError
        for a tensor whose shape or type has changed.
        """
        now = [tensors[name] for name in self._names]
        if not self._sources or not all(
            t is source and lies(t) == lay for t, (source, lay) in zip(now, self._sources, strict=True)
        ):
            for name, view, tensor in zip(self._names, self._views, now, strict=True):
                _check(name, view, tensor)
            self._sources = [(t, lies(t)) for t in now]
            self._together = _together(self._views, now)
        for views, values in self._together.values():
            copy_(views, values)
        if able(self._device).asynchronous:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                self._host.copy_(self._values, non_blocking=True)
                self._copied.record()

    def values(self) -> memoryview:
        """Wait until the host's copy is complete, and return its bytes."""
        if able(self._device).asynchronous:
            self._copied.synchronize()
        return self._host.numpy().data

    def not_finite(self, names: Collection[str]) -> str | None:
        """The first of these names whose tensor, in the host's copy, holds NaN or infinity; None if all are finite."""
        # A loop over all tensors would take the interpreter from the training's thread again and again.
        if all(bool(torch.stack(span.aminmax()).isfinite().all()) for span in self._floating()):
            return None
        for name, view in zip(self._names, self._views, strict=True):
            start, end = self._places[name]
            if name in names and not self._host[start:end].view(view.dtype).isfinite().all():
                return name
        return None

    def _floating(self) -> Iterator[torch.Tensor]:
        """For each floating type, the host's copy of all tensors of that type: they lie side by side."""
        ends: dict[torch.dtype, tuple[int, int]] = {}
        for name, view in zip(self._names, self._views, strict=True):
            if view.is_floating_point():
                start, end = self._places[name]
                ends[view.dtype] = (ends.get(view.dtype, (start, end))[0], end)
        for dtype, (start, end) in ends.items():
            if end > start:
                yield self._host[start:end].view(dtype)


def lies(tensor: torch.Tensor) -> _Lies:
    """Where the values lie and how they are read; equal for tensors that view the same memory in the same way."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _check(name: str, view: torch.Tensor, value: object) -> None:
    """Raises ModelError if the value is not a tensor with the shape and type of the view."""
    if not isinstance(value, torch.Tensor) or value.shape != view.shape or value.dtype != view.dtype:
        now = f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ModelError(
            f"{name} of the training's state is {now} now; expected {view.dtype}{list(view.shape)}, as at the start"
        )


def _together(views: Iterable[torch.Tensor], tensors: Iterable[torch.Tensor]) -> _Together:
    """Groups that one kernel can copy: equal types, and equal strides of source and target."""
    groups: _Together = {}
    for view, tensor in zip(views, tensors, strict=True):
        alike = seen_as(tensor.detach(), view)
        to, values = groups.setdefault((view.dtype, alike is not None), ([], []))
        to.append(view)
        values.append(tensor.detach() if alike is None else alike)
    return groups
