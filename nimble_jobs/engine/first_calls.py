"""What takes long when a process, or a shape, first calls it."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from nimble_jobs.engine.device import able, synchronize
from nimble_jobs.engine.difference import relative_norm
from nimble_jobs.engine.private.modules import Convolution
from nimble_jobs.engine.private.runtime import set_cudnn

_HALF = (torch.float16, torch.bfloat16)
_FEW_PICTURES = 4
_FEW_VALUES = 4 * 3 * 256 * 256  # of an input

log = logging.getLogger(__name__)

_loaded: set[tuple[torch.device, torch.dtype, bool]] = set()


def without_cudnn(call: Callable[..., Any], *, convolutions: bool) -> Callable[..., Any]:
    """`call` without cuDNN's attention and, with `convolutions`, without its convolutions.

    cuDNN makes a plan for each new shape: for an attention with a mask that took 40 ms on an H200, and its first call
    in a process 0.8 s. torch's own kernels take longer later, but a check calls few times.
    """

    def plain(*args: Any, **named: Any) -> Any:
        attention = torch.backends.cuda.cudnn_sdp_enabled()
        enabled: bool = torch.backends.cudnn.enabled
        torch.backends.cuda.enable_cudnn_sdp(False)
        set_cudnn(enabled and not convolutions)
        try:
            return call(*args, **named)
        finally:
            set_cudnn(enabled)
            torch.backends.cuda.enable_cudnn_sdp(attention)

    return plain


def quick_without_cudnn(module: nn.Module, sizes: Iterable[Sequence[int]]) -> bool:
    """Whether calls of a module with inputs of these sizes take hardly longer without cuDNN's convolutions: few small
    pictures in half precision.

    torch's own convolutions compute one picture and one group after the other, over a copy of each window. In fp32
    they compute with more digits than cuDNN.
    """
    layers = [m for m in module.modules() if isinstance(m, Convolution)]
    small = all(tuple(size[:1]) <= (_FEW_PICTURES,) and math.prod(size) <= _FEW_VALUES for size in sizes)
    plain = all(m.groups == 1 or (m.groups == m.in_channels and not m.transposed) for m in layers)
    return bool(layers) and small and plain and all(m.weight.dtype in _HALF for m in layers)


def load_comparison(device: torch.device) -> None:
    """Compare small tensors as large ones are compared on a GPU. A process's first time loads the kernels, which took
    0.6 s on an H200.
    """
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        values = torch.ones(8, dtype=dtype, device=device)
        relative_norm(values, values, on_host=0)


@contextmanager
def loading_operators(device: torch.device, dtype: torch.dtype, *, pictures: bool) -> Iterator[None]:
    """On a GPU, `load_operators` runs beside the block, which waits for it in the end; once in a process.

    What fails there is left to the model, which calls the same.
    """
    if not able(device).graphs or (device, dtype, pictures) in _loaded:
        yield
        return
    thread = threading.Thread(target=_try_operators, args=(device, dtype, pictures), name="first-calls", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def load_operators(device: torch.device, dtype: torch.dtype, *, pictures: bool) -> None:
    """Call what networks of texts, or with `pictures` convolutional ones, mostly consist of, with small tensors.

    A process's first call of an operator loads its kernels, and sometimes a library such as cuDNN: 1 to 100 ms for each
    on an H200.
    """
    _loaded.add((device, dtype, pictures))
    with torch.no_grad():
        x = torch.zeros(2, 8, 8, 8, device=device, dtype=dtype)
        if pictures:
            _of_pictures(x)
            _of_pictures(x.to(memory_format=torch.channels_last))
        else:
            _of_texts(x.view(2, 8, 64))
    synchronize(device)


def _try_operators(device: torch.device, dtype: torch.dtype, pictures: bool) -> None:
    try:
        load_operators(device, dtype, pictures=pictures)
    except Exception as error:  # noqa: BLE001  # the model meets it, too
        log.debug("operators were not loaded ahead: %s", error)


def _of_pictures(x: torch.Tensor) -> None:
    """`x`: [2, 8, 8, 8]."""
    channels = x.new_ones(8)
    x = functional.batch_norm(
        functional.conv2d(x, x[:1, :, :1, :1].expand(8, 8, 1, 1)), channels, channels, channels, channels
    )
    x = functional.conv2d(functional.relu(x, inplace=True), x[:1, :, :3, :3].expand(8, 8, 3, 3), channels, padding=1)
    x = torch.cat([x + functional.max_pool2d(x, 3, 1, 1), functional.avg_pool2d(x, 3, 1, 1)], 1)
    x = functional.adaptive_avg_pool2d(x, 1).flatten(1)
    functional.linear(x, x.new_ones(8, 16), channels)


def _of_texts(x: torch.Tensor) -> None:
    """`x`: [2, 8, 64]."""
    width = x.new_ones(x.shape[-1])
    x = functional.layer_norm(
        functional.embedding(torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device), x[0]) + x, (64,), width
    )
    functional.softmax(functional.gelu(functional.linear(x, width.expand(64, 64), width)), -1)
