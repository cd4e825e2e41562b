"""A linear layer with GELU in one kernel of our own. The library's products know no exact GELU.

An operator computes it in torch. A pass over a compiler's graph (`product_gelu_pass`) puts it there where our kernel is
faster than the library's product with a second kernel. In the recording our kernel takes its place.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from nimble_jobs.engine.private.operators import OpOverload
from nimble_jobs.engine.static_kernel import StaticKernel
from nimble_jobs.kernels import static_triton
from nimble_jobs.kernels.ahead import Compiles
from nimble_jobs.kernels.own_kernels import Launched, tile_in
from nimble_jobs.kernels.static_triton import MOST, TYPES, Launch, capability_of, is_dense
from nimble_jobs.schedule import Program, Task, View

PREFIX = "triton.product_gelu"
_FEW = 512  # rows
TILES_FEW_ROWS = {  # by name: blocks of rows, features and inputs, warps, stages
    "64x64x64": (64, 64, 64, 4, 5),
    "64x32x128": (64, 32, 128, 4, 4),
    "128x64x64": (128, 64, 64, 8, 4),
}
TILES_MANY_ROWS = {  # for more; the last number says how many blocks run on one multiprocessor
    "128x256x64": (128, 256, 64, 8, 3, 1),
    "128x128x64": (128, 128, 64, 8, 3, 2),
}
_MULTIPROCESSORS = 132  # of an H100 or H200
_GROUP = 8  # blocks of rows that share what they read of the weights
_NAMESPACE = "nimble_jobs"

_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")
_LIBRARY.define(
    "product_gelu(Tensor x, Tensor weight, Tensor bias, str tile) -> Tensor", tags=(torch.Tag.needs_exact_strides,)
)


def _computed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, tile: str) -> torch.Tensor:
    return functional.gelu(functional.linear(x, weight, bias)).contiguous()


def _shape_of(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, tile: str) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("product_gelu", _computed, _key)
_LIBRARY.impl("product_gelu", _shape_of, "Meta")

OPERATOR: OpOverload = getattr(torch.ops, _NAMESPACE).product_gelu.default


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Everything that decides its time."""

    dtype: str  # torch's name without the prefix
    rows: int
    features: int
    inputs: int

    @property
    def words(self) -> str:
        """As `explain` calls it."""
        return f"linear layer, {self.dtype}, {self.rows}x{self.inputs} to {self.features}, then GELU"

    @property
    def tiles(self) -> tuple[str, ...]:
        """The tiles that our kernel can use; none if it cannot compute this shape."""
        if self.dtype not in ("float16", "bfloat16") or not 0 < self.rows < MOST or self.features * self.inputs >= MOST:
            return ()  # kernels count rows and weights in 32 bits
        tiles = TILES_FEW_ROWS if self.rows <= _FEW else TILES_MANY_ROWS
        return tuple(name for name, tile in tiles.items() if self.features % tile[1] == 0 == self.inputs % tile[2])

    @property
    def sizes(self) -> tuple[int, ...]:
        """What the kernel is given after its tensors."""
        return () if self.rows <= _FEW else (self.rows,)

    def name(self, tile: str) -> str:
        """The kernel's name, which tells binaries and grids apart."""
        return f"{PREFIX}.{self.dtype}.{self.rows}x{self.inputs}x{self.features}.{tile}"


Wanted = Callable[[Shape, torch.device], str | None]  # with which tile our kernel is to compute a shape; None: not


def wanted_as_in(program: Program) -> Wanted:
    """As in an earlier recording of the same module."""
    return tile_in({task.op for task in program.tasks})


def launched(task: Task, device: torch.device) -> Launched | None:
    """Our kernel for a task of the operator; None for any other task, and over memory that it cannot read.

    Raises EngineError if Triton cannot compile it.
    """
    shape = shape_of(task)
    if shape is None:
        return None
    kernel = compiled(shape, str(task.args[3]), capability_of(device))
    return Launched(kernel=kernel, given=task.args[:3], sizes=shape.sizes)


def shape_of(task: Task) -> Shape | None:
    """What a task of the operator computes, if our kernel can; None for any other task."""
    if task.op != str(OPERATOR):
        return None
    views = [each for each in (*task.args[:3], task.outputs) if isinstance(each, View)]
    if len(views) != 4 or not all(is_dense(view) for view in views) or len({view.dtype for view in views}) != 1:
        return None
    x, weight, _, _ = views
    shape = Shape(dtype=x.dtype, rows=math.prod(x.shape[:-1]), features=weight.shape[0], inputs=weight.shape[1])
    return shape if task.args[3] in shape.tiles else None


@Compiles
def compiled(shape: Shape, tile: str, capability: int) -> StaticKernel:
    """Compile the kernel for a GPU of this compute capability, such as 90. Needs Triton, but no GPU.

    Raises EngineError if Triton cannot compile it.
    """
    if shape.rows > _FEW:
        rows, features, _, _, _, at_once = TILES_MANY_ROWS[tile]
        blocks = min(-(-shape.rows // rows) * (shape.features // features), at_once * _MULTIPROCESSORS)
        kernel = _for_many_rows(shape.dtype, shape.features, shape.inputs, tile, capability)
        return dataclasses.replace(kernel, name=shape.name(tile), grid=(blocks, 1, 1))
    from nimble_jobs.kernels import product_gelu_triton

    rows, features, inputs, warps, stages = TILES_FEW_ROWS[tile]
    grid = (-(-shape.rows // rows), shape.features // features, 1)
    sizes = {"ROWS": shape.rows, "FEATURES": shape.features, "INPUTS": shape.inputs}
    return static_triton.compiled(
        product_gelu_triton.product_gelu,
        Launch(name=shape.name(tile), grid=grid, warps=warps, stages=stages),
        capability,
        pointers=_pointers(shape.dtype),
        constants=sizes | {"ROW_BLOCK": rows, "FEATURE_BLOCK": features, "INPUT_BLOCK": inputs},
    )


@functools.lru_cache(maxsize=1024)
def _for_many_rows(dtype: str, features: int, inputs: int, tile: str, capability: int) -> StaticKernel:
    """The kernel that takes the number of rows as an argument: batches of many lengths share its machine code."""
    from nimble_jobs.kernels import product_gelu_triton

    row_block, feature_block, input_block, warps, stages, _ = TILES_MANY_ROWS[tile]
    blocks = {"ROW_BLOCK": row_block, "FEATURE_BLOCK": feature_block, "INPUT_BLOCK": input_block, "GROUP": _GROUP}
    return static_triton.compiled(
        product_gelu_triton.product_gelu_many,
        Launch(name=f"{PREFIX}.{dtype}.{inputs}x{features}.{tile}", grid=(1, 1, 1), warps=warps, stages=stages),
        capability,
        pointers=_pointers(dtype),
        sizes=("rows",),
        constants={"FEATURES": features, "INPUTS": inputs} | blocks,
    )


def _pointers(dtype: str) -> dict[str, str]:
    return dict.fromkeys(("x", "weight", "bias", "out"), TYPES[dtype])
