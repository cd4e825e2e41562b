"""Scaled dot-product attention in one kernel of our own, for the shapes where it beats the library's.

An operator computes it in torch. A pass over a compiler's graph (`attention_pass`) puts it there where our kernel is
faster. In the recording our kernel takes its place.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import functional

from nimble_jobs.engine.private.operators import OpOverload
from nimble_jobs.engine.static_kernel import StaticKernel
from nimble_jobs.kernels import static_triton
from nimble_jobs.kernels.ahead import Compiles
from nimble_jobs.kernels.own_kernels import Launched, tile_in
from nimble_jobs.kernels.static_triton import MOST, TYPES, Launch, aligned, capability_of, is_dense, power_of_two
from nimble_jobs.schedule import Program, Task, View

PREFIX = "triton.attention"
MOST_ROWS = 1 << 16  # places within a head need no more than 32 bits
MOST_KEYS = 2048  # beyond that the library's kernels, which keep more under way, are faster
TILES = {  # by name: blocks of rows and keys, warps, stages
    "32x128": (32, 128, 4, 2),
    "32x256": (32, 256, 4, 1),
    "64x32": (64, 32, 4, 3),
    "64x64": (64, 64, 4, 2),
    "64x128": (64, 128, 4, 2),
    "128x64": (128, 64, 8, 3),
}
_BLOCK_ROWS = 64  # what "blocks" means in the two limits below
_MOST_SMALL = 512  # with more blocks a GPU is full anyway; tiles of 32 rows would only load keys more often
_FEWEST_LARGE = 128  # with fewer, not every multiprocessor of a large GPU has one
_LARGE = ("64x32", "128x64")  # tiles for many blocks: one waits often, the other needs many rows
_NAMESPACE = "nimble_jobs"

_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")
_LIBRARY.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale, str tile) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),  # rows of queries, keys and values may lie in one product's rows
)


def _computed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float, tile: str
) -> torch.Tensor:
    if mask is not None:
        mask = mask.expand(-1, -1, q.shape[2], k.shape[2])
    found = functional.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale)
    return found.transpose(1, 2).contiguous()


def _shape_of(q: torch.Tensor, *_: Any) -> torch.Tensor:
    batch, heads, rows, dim = q.shape
    return q.new_empty((batch, rows, heads, dim))


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("attention", _computed, _key)
_LIBRARY.impl("attention", _shape_of, "Meta")

OPERATOR: OpOverload = getattr(torch.ops, _NAMESPACE).attention.default

Mask = Literal["none", "true", "added"]  # what a mask says: nothing, where to look, or numbers to add to the scores


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What decides its time, but for how the tensors lie in memory."""

    dtype: str  # torch's name without the prefix
    batch: int
    heads: int
    rows: int  # queries of a head
    keys: int
    dim: int  # of a head
    mask: Mask = "none"
    causal: bool = False

    @property
    def words(self) -> str:
        """As `explain` calls it."""
        sizes = f"{self.batch}x{self.heads}x{self.rows}x{self.dim}, {self.keys} keys"
        masked = {"none": "", "true": ", masked", "added": ", mask added"}[self.mask]
        return f"attention, {self.dtype}, {sizes}{masked}{', causal' if self.causal else ''}"

    @property
    def tiles(self) -> tuple[str, ...]:
        """The tiles that are worth trying, at most six; none if our kernel cannot compute this shape."""
        if self.dtype not in ("float16", "bfloat16") or not 16 <= self.dim <= 128 or self.dim % 8:
            return ()
        if min(self.batch, self.heads, self.rows, self.keys) < 1 or self.keys > MOST_KEYS or self.rows > MOST_ROWS:
            return ()
        if self.batch * self.heads >= 2**16:  # blocks in that direction
            return ()
        most_rows, most_keys = max(64, power_of_two(self.rows)), max(128, power_of_two(self.keys))
        blocks = self.batch * self.heads * -(-self.rows // _BLOCK_ROWS)

        def fits(name: str) -> bool:
            rows, keys, *_ = TILES[name]
            if (rows < _BLOCK_ROWS and blocks > _MOST_SMALL) or (name in _LARGE and blocks < _FEWEST_LARGE):
                return False
            return rows <= most_rows and keys <= most_keys

        return tuple(filter(fits, TILES))

    def name(self, tile: str) -> str:
        """The kernel's name, but for how the tensors lie."""
        extra = {"none": "", "true": ".masked", "added": ".added"}[self.mask] + (".causal" if self.causal else "")
        sizes = f"{self.batch}x{self.heads}x{self.rows}x{self.keys}x{self.dim}"
        return f"{PREFIX}.{self.dtype}.{sizes}{extra}.{tile}"


@dataclass(frozen=True, kw_only=True)
class Strides:
    """How the tensors lie in memory, in elements: batch, head, row. A stride of 0 repeats."""

    q: tuple[int, int, int]
    k: tuple[int, int, int]
    v: tuple[int, int, int]
    mask: tuple[int, int, int, int] = (0, 0, 0, 0)  # and key

    @property
    def digest(self) -> str:
        """Short, for names of kernels."""
        return hashlib.sha256(repr((self.q, self.k, self.v, self.mask)).encode()).hexdigest()[:8]


Wanted = Callable[[Shape, torch.device], str | None]  # with which tile our kernel is to compute a shape; None: not


def wanted_as_in(program: Program) -> Wanted:
    """As in an earlier recording of the same module, by our kernels and by operators that stayed."""
    names = {task.op.rpartition(".")[0] for task in program.tasks if task.op.startswith(PREFIX)}
    for task in program.tasks:
        shape = _shape(task) if task.op == str(OPERATOR) else None
        names |= {shape.name(str(task.args[6]))} if shape is not None else set()
    return tile_in(names, TILES)


def launched(task: Task, device: torch.device) -> Launched | None:
    """Our kernel for a task of the operator; None for any other task, and over memory that it cannot read.

    Raises EngineError if Triton cannot compile it.
    """
    seen = shape_of(task)
    if seen is None:
        return None
    q, k, v, mask = task.args[:4]  # without a mask the kernel does not read that argument
    kernel = compiled(*seen, float(str(task.args[5])), str(task.args[6]), capability_of(device))
    return Launched(kernel=kernel, given=(q, k, v, q if mask is None else mask))


def shape_of(task: Task) -> tuple[Shape, Strides] | None:
    """What a task of the operator computes, and over which memory, if our kernel can; None for any other task."""
    shape = _shape(task) if task.op == str(OPERATOR) else None
    if shape is None or not shape.tiles or task.args[6] not in TILES:  # an earlier build may have tried other tiles
        return None
    q, k, v, mask = task.args[:4]
    assert isinstance(q, View)
    assert isinstance(k, View)
    assert isinstance(v, View)
    assert isinstance(task.outputs, View)
    if not is_dense(task.outputs) or any(each.stride[3] != 1 or not aligned(each) for each in (q, k, v)):
        return None
    if isinstance(mask, View) and not aligned(mask):
        return None
    if any((each.shape[2] - 1) * each.stride[2] >= MOST for each in (q, k, v)):  # the kernel counts rows in 32 bits
        return None
    return shape, Strides(
        q=outer_strides(q.stride),
        k=outer_strides(k.stride),
        v=outer_strides(v.stride),
        mask=_repeating(mask) if isinstance(mask, View) else (0, 0, 0, 0),
    )


def _shape(task: Task) -> Shape | None:
    """What a task of the operator computes, wherever it lies; None if our kernel could not, however it lay."""
    q, k, v, mask, causal = task.args[:5]
    if not (isinstance(q, View) and isinstance(k, View) and isinstance(v, View) and isinstance(task.outputs, View)):
        return None
    if len({each.dtype for each in (q, k, v, task.outputs)}) != 1 or v.shape != k.shape:
        return None
    kind: Mask = "none"
    if isinstance(mask, View):
        kind = "true" if mask.dtype == "bool" else "added"
        if (kind == "added" and mask.dtype != q.dtype) or len(mask.shape) != 4:
            return None
    batch, heads, rows, dim = q.shape
    return Shape(
        dtype=q.dtype, batch=batch, heads=heads, rows=rows, keys=k.shape[2], dim=dim, mask=kind, causal=causal is True
    )


@Compiles
def compiled(shape: Shape, strides: Strides, scale: float, tile: str, capability: int) -> StaticKernel:
    """Compile the kernel for a GPU of this compute capability, such as 90. Needs Triton, but no GPU.

    Raises EngineError if Triton cannot compile it.
    """
    from nimble_jobs.kernels import attention_triton

    rows, keys, warps, stages = TILES[tile]
    grid = (-(-shape.rows // rows), shape.batch * shape.heads, 1)
    kind = TYPES[shape.dtype]
    mask = {"none": kind, "true": "i8", "added": kind}[shape.mask]
    sizes = blocks(shape, tile)
    whole, rest = divmod(shape.keys, keys)
    steps = whole + (rest > 0 and sizes["REST_BLOCK"] == 0)  # of the kernel's loop
    return static_triton.compiled(
        attention_triton.attention,
        Launch(
            name=f"{shape.name(tile)}.{strides.digest}{_scaled(scale)}",
            grid=grid,
            warps=warps,
            stages=stages if steps > 1 else 1,
        ),
        capability,
        pointers={"q": kind, "k": kind, "v": kind, "mask": mask, "out": kind},
        constants=constants(shape, strides, scale) | sizes,
    )


def constants(shape: Shape, strides: Strides, scale: float) -> dict[str, int | float]:
    """The kernel's constants, except for its blocks."""
    made: dict[str, int | float] = {
        "SCALE": scale,
        "HEADS": shape.heads,
        "ROWS": shape.rows,
        "KEYS": shape.keys,
        "DIM": shape.dim,
        "DIM_BLOCK": power_of_two(shape.dim),
    }
    for name, values in (("Q", strides.q), ("K", strides.k), ("V", strides.v)):
        made |= dict(zip((f"{name}_BATCH", f"{name}_HEAD", f"{name}_ROW"), values, strict=True))
    made["MASK"] = {"none": 0, "true": 1, "added": 2}[shape.mask]
    made |= dict(zip(("M_BATCH", "M_HEAD", "M_ROW", "M_KEY"), strides.mask, strict=True))
    return made | {"CAUSAL": int(shape.causal), "FOLDED": int(folds(shape, scale))}


def folds(shape: Shape, scale: float) -> bool:
    """Whether the kernel may scale scores within the exponent: exp2(score * factor - largest), one fused multiply-add.

    The factor has to be positive, for the largest score to be the largest after it, and a normal number in fp32, as
    must be its product with every finite score: infinity less itself is NaN, and the fused form would not notice.
    Added numbers are in other units than scores, so these are scaled before. As in FlashAttention, results may become
    zero, infinite or NaN without notice if scaled scores are beyond 2^28: the largest is rounded, the fused product is
    not, and they differ too much there.
    """
    info = torch.finfo(getattr(torch, shape.dtype))
    single = torch.finfo(torch.float32)
    factor = scale * math.log2(math.e)
    return shape.mask != "added" and single.tiny <= factor <= single.max / min(single.max, shape.dim * info.max**2)


def blocks(shape: Shape, tile: str) -> dict[str, int]:
    """Rows and keys that the kernel takes at a time; and how many for keys beyond the last whole block, 0 as others.

    Where that would be a block as large as the only whole one, a loop over both runs its loads ahead. In causal order
    most rows may not look at the last keys.
    """
    rows, keys, *_ = TILES[tile]
    whole, rest = divmod(shape.keys, keys)
    narrow = max(16, power_of_two(rest)) if rest and not shape.causal else 0
    if whole == 1 and narrow == keys:
        narrow = 0
    return {"ROW_BLOCK": rows, "KEY_BLOCK": keys, "REST_BLOCK": narrow}


def _scaled(scale: float) -> str:
    """The scale as a part of a name without dots."""
    return f"-{scale!r}".replace(".", "_")


def outer_strides(strides: tuple[int, ...]) -> tuple[int, int, int]:
    """The strides of batch, head and row."""
    batch, head, row = strides[:3]
    return batch, head, row


def _repeating(view: View) -> tuple[int, int, int, int]:
    """Strides; 0 where the view has one element for all."""
    batch, head, row, key = (s if size > 1 else 0 for s, size in zip(view.stride, view.shape, strict=True))
    return batch, head, row, key
