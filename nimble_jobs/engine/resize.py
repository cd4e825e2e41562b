"""Resizes, crops and rounds decoded pictures of any sizes to rows of one size, in one launch for the whole batch.

Decoders return pictures as planes, uint8 [channels, height, width]. On a GPU one kernel reads them all through a table
with a line for each picture. On a CPU, matrix products compute the same values. `resizing` defines them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nimble_jobs.decoding.recipe import MAX_PIXELS, Recipe
from nimble_jobs.engine import enqueue
from nimble_jobs.engine.cuda_driver import load_function
from nimble_jobs.engine.device import able
from nimble_jobs.engine.private.runtime import launch_kernel
from nimble_jobs.errors import EngineError, first_line
from nimble_jobs.resizing import Interpolation, weights

FIELDS = 10  # numbers per line of the table
_PLACES = 256  # of a result that one block makes
_WARPS = 4
_COMPILING = threading.Lock()


@dataclass(frozen=True, kw_only=True, eq=False)
class Planes:
    """Decoded pictures, each uint8 [channels, h, w], contiguous."""

    addresses: np.ndarray  # int64 [n]: address of each picture's first pixel
    sizes: np.ndarray  # int64 [n, 2]: height and width
    held: Sequence[torch.Tensor]  # tensors that own the memory: one for each picture, or one for all

    def __len__(self) -> int:
        return len(self.addresses)

    @classmethod
    def of(cls, pictures: Sequence[torch.Tensor]) -> Planes:
        """Planes for pictures that are tensors of their own."""
        sizes = np.array([p.shape[1:] for p in pictures], dtype=np.int64).reshape(-1, 2)
        return cls(addresses=np.array([p.data_ptr() for p in pictures], dtype=np.int64), sizes=sizes, held=pictures)

    @classmethod
    def together(cls, flat: torch.Tensor, channels: int, sizes: np.ndarray) -> Planes:
        """Planes for pictures one after another in `flat`, uint8 [*]. `sizes`, int64 [n, 2]: height and width."""
        nbytes = channels * sizes.prod(axis=1)
        return cls(addresses=flat.data_ptr() + np.cumsum(nbytes) - nbytes, sizes=sizes, held=(flat,))

    def and_(self, others: Planes) -> Planes:
        """These planes, followed by the others."""
        return Planes(
            addresses=np.concatenate([self.addresses, others.addresses]),
            sizes=np.concatenate([self.sizes, others.sizes]),
            held=(*self.held, *others.held),
        )

    def pictures(self, channels: int) -> list[torch.Tensor]:
        """Each picture as uint8 [channels, h, w]."""
        if len(self.held) == len(self) and all(p.dim() == 3 for p in self.held):
            return list(self.held)
        sizes = self.sizes.tolist()
        parts = self.held[0].split([channels * height * width for height, width in sizes])
        return [part.view(channels, *size) for part, size in zip(parts, sizes, strict=True)]


def sizes_after(recipe: Recipe, sizes: np.ndarray) -> np.ndarray:
    """int64 [n, 2]: what pictures of these sizes [n, 2] (height, width) are resized to."""
    sizes = sizes.astype(np.int64)
    if recipe.shortest_edge is not None:
        new: np.ndarray = recipe.shortest_edge * sizes // sizes.min(axis=1, keepdims=True)
        return new
    return sizes if recipe.resize is None else np.broadcast_to(np.array(recipe.resize), sizes.shape)


def fitting(recipe: Recipe, sizes: np.ndarray) -> np.ndarray:
    """bool [n]: which pictures of these sizes [n, 2] (height, width) become a result of the right size."""
    new = sizes_after(recipe, sizes)
    compare = np.greater_equal if recipe.center_crop is not None else np.equal
    return np.asarray(compare(new, recipe.size).all(axis=1) & (new.prod(axis=1) <= MAX_PIXELS))


def lines(recipe: Recipe, planes: Planes, rows: np.ndarray, boxes: np.ndarray | None = None) -> np.ndarray:
    """The kernel's table, int64 [n, FIELDS]: what it does with each picture.

    The fields are: address of the first pixel, pixels from channel to channel and from row to row, height and width
    before and after the resize, top and left of the crop, row of the result.
    With `boxes`, int32 [n, 4] (top, left, height, width), only this part of each picture is resized, to the
    result's size.
    """
    line = np.empty((len(planes), FIELDS), dtype=np.int64)
    line[:, 0] = planes.addresses
    line[:, 3:5] = planes.sizes
    line[:, 1] = line[:, 3] * line[:, 4]
    line[:, 2] = line[:, 4]
    if boxes is None:
        line[:, 5:7] = sizes_after(recipe, planes.sizes)
        line[:, 7:9] = (line[:, 5:7] - recipe.size) // 2
    else:
        line[:, 0] += boxes[:, 0].astype(np.int64) * line[:, 2] + boxes[:, 1]
        line[:, 3:5] = boxes[:, 2:]
        line[:, 5:7] = recipe.size
        line[:, 7:9] = 0
    line[:, 9] = rows
    return line


class Tables:
    """Memory for the kernel's table, on the host and on the device, and for what it finds. For one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.empty(0, FIELDS, dtype=torch.int64)
        self._there = torch.empty(0, FIELDS, dtype=torch.int64, device=device)
        self.flags = torch.empty(0, dtype=torch.uint8)  # on the host, where kernels write them

    def make(self, lines: int) -> None:
        """Allocate memory for `lines` lines. The stream must be idle."""
        if self._device.type == "cuda" and len(self._there) < lines:
            self._host = torch.empty(lines, FIELDS, dtype=torch.int64, pin_memory=True)
            self._there = torch.empty(lines, FIELDS, dtype=torch.int64, device=self._device)
            self.flags = torch.empty(lines, dtype=torch.uint8, pin_memory=True)

    def send(self, lines: np.ndarray, stream: torch.cuda.Stream) -> torch.Tensor:
        """Copy lines, int64 [n, FIELDS], to the device, after all earlier work on `stream`."""
        host, there = self._host[: len(lines)], self._there[: len(lines)]
        host.numpy()[...] = lines
        enqueue.copy(there, host, stream)
        return there

    def blank(self, count: int) -> np.ndarray:
        """bool [count]: which of the first pictures of the last launch looked like blank memory, in the part that
        was resized. The stream must be idle.
        """
        blank: np.ndarray = self.flags[:count].numpy() != 0
        return blank


def resize_into(
    out: torch.Tensor,
    planes: Planes,
    rows: np.ndarray,
    recipe: Recipe,
    boxes: np.ndarray | None = None,
    *,
    tables: Tables | None = None,
    after: torch.cuda.Event | None = None,
) -> None:
    """Write each picture to its row of `out`, uint8 [n, height, width, channels].

    All tensors are contiguous and on one device. On a GPU this is one launch on the current stream, and the pictures
    must live until it is over. `tables` is memory for the kernel's table; without it, some is allocated. `out` is
    written after `after`. Raises EngineError if the kernel cannot be compiled or loaded.
    """
    if not len(planes):
        return
    if not able(out.device).kernels:
        for i, (picture, row) in enumerate(zip(planes.pictures(recipe.channels), rows.tolist(), strict=True)):
            out[row] = _resized(picture, recipe, None if boxes is None else boxes[i].tolist())
        return
    stream = torch.cuda.current_stream(out.device)
    if tables is None:
        tables = Tables(out.device)
        tables.make(len(planes))
    table = tables.send(lines(recipe, planes, rows, boxes), stream)
    if after is not None:
        enqueue.wait(stream, after)
    with _COMPILING:
        function, kernel = _loaded(out.device, recipe.channels, recipe.interpolation)
    blocks = -(-recipe.size[0] * recipe.size[1] // _PLACES)
    launch_kernel(
        function,
        (blocks, len(planes), 1),
        _WARPS,
        kernel.shared_bytes,
        kernel.arg_types,
        (table, out, tables.flags, *recipe.size, *kernel.scratch),
        stream.cuda_stream,
    )


def _resized(picture: torch.Tensor, recipe: Recipe, box: Sequence[int] | None) -> torch.Tensor:
    """Resize one picture on the CPU, to uint8 [height, width, channels]: the kernel's values, by matrix products."""
    height, width = new = recipe.size
    if box is None:
        new = tuple(sizes_after(recipe, np.array([picture.shape[1:]]))[0].tolist())
    else:
        top, left, down, across = box
        picture = picture[:, top : top + down, left : left + across]
    x = picture.to(torch.float32)
    if new != tuple(picture.shape[1:]):
        columns = torch.from_numpy(weights(x.shape[2], new[1], recipe.interpolation)).T
        x = x @ columns if recipe.interpolation == "bilinear" else _rounded(x @ columns)
        x = torch.from_numpy(weights(x.shape[1], new[0], recipe.interpolation)) @ x
    top, left = (x.shape[1] - height) // 2, (x.shape[2] - width) // 2
    x = x[:, top : top + height, left : left + width]
    return _rounded(x).to(torch.uint8).permute(1, 2, 0)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """Half up, to whole numbers from 0 to 255."""
    return (x + 0.5).floor_().clamp_(0, 255)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """Machine code, and how it is launched."""

    name: str
    binary: bytes
    shared_bytes: int
    arg_types: str
    scratch: tuple[None, ...]  # that compilers reserve and this kernel does not use


@functools.cache
def _loaded(device: torch.device, channels: int, interpolation: Interpolation) -> tuple[int, Kernel]:
    major, minor = torch.cuda.get_device_capability(device)
    kernel = compiled(10 * major + minor, channels, interpolation)
    return load_function(kernel.binary, kernel.name, kernel.shared_bytes, device), kernel


def constants_of(channels: int, places: int, interpolation: Interpolation) -> dict[str, int]:
    """The constants that the kernel is compiled with, by name. `places`: of a result that one block makes."""
    return {"FIELDS": FIELDS, "CHANNELS": channels, "PLACES": places, "CUBIC": int(interpolation == "bicubic")}


@functools.cache
def compiled(capability: int, channels: int, interpolation: Interpolation) -> Kernel:
    """The kernel for a GPU of this compute capability, as in 90. Needs Triton, and no GPU.

    Raises EngineError where Triton cannot compile it.
    """
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from nimble_jobs.engine import resize_triton

    function: Any = resize_triton.resize_ragged
    constants = constants_of(channels, _PLACES, interpolation)
    sizes = dict.fromkeys(resize_triton.SIZES, "i32")
    source = ASTSource(
        fn=function,
        signature={"table": "*i64", "out": "*u8", "flags": "*u8"} | sizes | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
    )
    try:
        made = compile_kernel(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": _WARPS})
    except Exception as e:  # Triton's errors have no common root, and its assembler's are plain ones
        raise EngineError(f"the resize of pictures: Triton cannot compile it: {first_line(e)}") from e
    scratch = [getattr(made.metadata, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    extra = sum(size is not None for size in scratch)
    return Kernel(
        name=made.metadata.name,
        binary=made.asm["cubin"],
        shared_bytes=made.metadata.shared,
        arg_types="OOO" + "i" * len(sizes) + "O" * extra,
        scratch=(None,) * extra,
    )
