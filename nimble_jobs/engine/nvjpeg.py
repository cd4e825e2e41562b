"""torchvision's nvJPEG decoder: whether it works on a device, and what its errors mean.

What matters about torchvision 0.26 (`decode_jpegs_cuda.cpp`):

- A process has one decoder, with its own stream, under one mutex. Calls from several threads queue up, but release the
  GIL, so the threads' other work overlaps.
- A call returns when its pictures are decoded. But neither it nor nvJPEG's hardware engines wait for the caller's
  stream. A picture could be decoded into freed memory that the caller's stream still reads. So the caller's stream must
  be idle (pytorch/vision#9606).
- An error fails the whole batch, also if memory runs out. The work that the call had begun goes on and writes to memory
  that is already free. The next call waits for that work before it writes to this memory.
- Baseline pictures go to the hardware engines as one batch, if there are engines. Others are decoded one by one.
- nvJPEG's own buffers grow with the largest batch and stay until the process ends.
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
    """A function from JPEGs, uint8 [length] on the host, to pictures, uint8 [channels, height, width] on the device.

    The function raises RuntimeError with torchvision's message; `refusal` interprets it.
    """
    mode = mode_of(channels)
    load_library()
    if able(device).decoder:
        return functools.partial(_on_device, mode=mode, device=device)
    return functools.partial(_on_host, mode=mode)


@functools.cache
def together() -> Together:
    """A function `(data, offsets, lengths, mode, device)` that decodes many spans of `data` in one call.

    It returns the pictures' pixels one after another in one tensor, uint8 [*], and their shapes one after another. It
    is TorchScript, so Python sees two tensors in all instead of two per picture. To free a tensor, a thread releases
    the interpreter's lock and has to get it back; that took a third of the decoding threads' time.
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
    """Why nvJPEG refuses one picture.

    Raises OutOfMemory if memory ran out, and DeviceFault if the device was lost.
    """
    reason = first_line(error)
    if _NO_MEMORY.search(reason):
        raise OutOfMemory(f"not enough device memory to decode pictures: {reason}") from error
    if able(device).asynchronous:
        try:
            # Raises if the context is lost. Only this stream, since other threads may be capturing.
            torch.cuda.current_stream(device).synchronize()
        except RuntimeError as lost:
            raise DeviceFault(f"the device was lost while it decoded pictures: {reason}; {first_line(lost)}") from lost
    return reason


@functools.cache
def load_library() -> None:
    """Load torchvision's operators for images without the rest of torchvision, which takes seconds to import.

    Raises RuntimeError if they are missing or cannot be loaded.
    """
    libraries = sorted(torchvision_folder().glob("image*.so"))
    if not libraries:
        raise RuntimeError("this torchvision was built without decoders")
    try:
        torch.ops.load_library(libraries[0])
    except OSError as e:
        raise RuntimeError(f"torchvision's decoders cannot be loaded: {e}") from e


def torchvision_folder() -> Path:
    """The folder of the package, found without importing it. Raises RuntimeError if it is not installed."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise RuntimeError("torchvision is not installed")
    return Path(spec.origin).parent
