"""torchvision's nvJPEG decoder: whether it works here, and how its errors are to be read.

What matters about torchvision 0.26 (`decode_jpegs_cuda.cpp`):

- One decoder a process, with a stream of its own, under one mutex. Calls of several threads queue up; what the threads
  do beside them overlaps. The GIL is released.
- A call returns when its pictures are decoded. But it does not wait for the caller's stream, and nvJPEG's hardware
  engines would not either: a picture may be decoded into memory that was freed and that the caller's stream still
  reads. So the caller's stream must be idle (pytorch/vision#9606).
- An error fails the whole batch. Memory that runs out inside of it is such an error, too. What the call had begun goes
  on, and writes to memory that is free already; the next call waits for it before it writes to that memory.
- Baseline pictures go to the hardware engines, if there are any, as one batch; others are decoded one by one.
- nvJPEG's own buffers grow with the largest batch, and are kept until the process ends.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from nimble_jobs.engine.device import able
from nimble_jobs.errors import DeviceFault, OutOfMemory, first_line

Decode = Callable[[list[torch.Tensor]], list[torch.Tensor]]
Together = Callable[[torch.Tensor, list[int], list[int], int, torch.device], tuple[torch.Tensor, list[int]]]

_GRAY, _RGB = 1, 3  # of torchvision.io.ImageReadMode
_NO_MEMORY = re.compile(r"out of memory|failed to .*: 5\b", re.IGNORECASE)  # 5: NVJPEG_STATUS_ALLOCATOR_FAILURE


def decoder(device: torch.device, channels: int) -> Decode:
    """JPEGs, uint8 [length] on the host, to pictures on the device, uint8 [channels, height, width].

    Raises RuntimeError when called, for whatever torchvision says; see `refusal`.
    """
    mode = mode_of(channels)
    load_library()
    if able(device).decoder:
        return functools.partial(_on_device, mode=mode, device=device)
    return functools.partial(_on_host, mode=mode)


@functools.cache
def together() -> Together:
    """A function `(data, offsets, lengths, mode, device)` that decodes many spans in one call: their pictures one after
    another in one tensor, uint8 [*], and their shapes one after another.

    It is TorchScript, so Python sees two tensors instead of two for each picture. To free one, a thread gives up the
    interpreter's lock and must get it back; that took a third of the decoding threads' time.
    """
    load_library()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        made: Together = torch.jit.script(_together)
    return made


def _together(
    data: torch.Tensor, offsets: list[int], lengths: list[int], mode: int, device: torch.device
) -> tuple[torch.Tensor, list[int]]:
    spans: list[torch.Tensor] = []
    for i in range(len(offsets)):
        spans.append(data.narrow(0, offsets[i], lengths[i]))
    decoded: list[torch.Tensor] = []
    if device.type == "cuda":
        decoded = torch.ops.image.decode_jpegs_cuda(spans, mode, device)
    else:
        for span in spans:
            decoded.append(torch.ops.image.decode_jpeg(span, mode))
    shapes: list[int] = []
    flat: list[torch.Tensor] = []
    for picture in decoded:
        shapes.extend(picture.shape)
        flat.append(picture.reshape(-1))
    return torch.cat(flat), shapes


def mode_of(channels: int) -> int:
    """torchvision's number for grey or RGB."""
    return _GRAY if channels == 1 else _RGB


def _on_device(encoded: list[torch.Tensor], *, mode: int, device: torch.device) -> list[torch.Tensor]:
    decoded: list[torch.Tensor] = torch.ops.image.decode_jpegs_cuda(encoded, mode, device)
    return decoded


def _on_host(encoded: list[torch.Tensor], *, mode: int) -> list[torch.Tensor]:
    return [torch.ops.image.decode_jpeg(one, mode) for one in encoded]


def refusal(error: RuntimeError, device: torch.device) -> str:
    """Why nvJPEG does not take one picture.

    Raises OutOfMemory or DeviceFault where the picture is not to blame, or took the device with it.
    """
    reason = first_line(error)
    if _NO_MEMORY.search(reason):
        raise OutOfMemory(f"no memory left to decode pictures: {reason}") from error
    if able(device).asynchronous:
        try:
            torch.cuda.current_stream(device).synchronize()  # raises if the context is lost; others may be capturing
        except RuntimeError as lost:
            raise DeviceFault(f"the device was lost while it decoded pictures: {reason}; {first_line(lost)}") from lost
    return reason


@functools.cache
def load_library() -> None:
    """Load torchvision's operators on images, without the rest of torchvision, which takes seconds to import.

    Raises RuntimeError where there are none.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise RuntimeError("torchvision is not installed")
    libraries = sorted(Path(spec.origin).parent.glob("image*.so"))
    if not libraries:
        raise RuntimeError("torchvision was built without its decoders")
    try:
        torch.ops.load_library(libraries[0])
    except OSError as e:
        raise RuntimeError(f"torchvision's decoders cannot be loaded: {e}") from e
