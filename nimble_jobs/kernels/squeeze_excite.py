"""Squeeze-and-excitation (average, two small layers, gates, scaling) in two kernels of our own instead of five.

Two operators compute it in torch. A pass over a compiler's graph (`squeeze_excite_pass`) puts them there where our
kernels are faster, and in the recording our kernels take their place. They are stored as machine code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nimble_jobs.engine.private.operators import OpOverload
from nimble_jobs.engine.static_kernel import StaticKernel
from nimble_jobs.kernels import static_triton
from nimble_jobs.kernels.ahead import Compiles
from nimble_jobs.kernels.own_kernels import Launched
from nimble_jobs.kernels.static_triton import MOST, TYPES, Launch, capability_of, is_dense, lies, power_of_two
from nimble_jobs.schedule import Program, Task, View

PREFIX = "triton.squeeze_excite"
MOST_HIDDEN = 512
_NAMESPACE = "nimble_jobs"
_BLOCKS = (128, 264)  # blocks of the first and of the second kernel, about: one and two for each SM of an H200

_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")
_EXACT_STRIDES = (torch.Tag.needs_exact_strides,)
_LIBRARY.define("squeeze(Tensor x, Tensor weight, int parts) -> Tensor", tags=_EXACT_STRIDES)
_LIBRARY.define(
    "excite(Tensor x, Tensor parts, Tensor bias, Tensor weight, Tensor gate_bias, bool silu, bool sigmoid) -> Tensor",
    tags=_EXACT_STRIDES,
)


def _squeeze(x: torch.Tensor, weight: torch.Tensor, parts: int) -> torch.Tensor:
    hidden = x.float().mean((2, 3)) @ weight.float().flatten(1).t()
    found = hidden.new_zeros(x.shape[0], parts, weight.shape[0])
    found[:, 0] = hidden
    return found


def _excite(
    x: torch.Tensor,
    parts: torch.Tensor,
    bias: torch.Tensor,
    weight: torch.Tensor,
    gate_bias: torch.Tensor,
    silu: bool,
    sigmoid: bool,
) -> torch.Tensor:
    hidden = parts.sum(1) + bias.float()
    hidden = torch.nn.functional.silu(hidden) if silu else hidden.relu()
    gate = hidden @ weight.float().flatten(1).t() + gate_bias.float()
    gate = gate.sigmoid() if sigmoid else torch.nn.functional.hardsigmoid(gate)
    return (x.float() * gate[:, :, None, None]).to(x.dtype).contiguous(memory_format=torch.channels_last)


def _squeezed_shape(x: torch.Tensor, weight: torch.Tensor, parts: int) -> torch.Tensor:
    return x.new_empty((x.shape[0], parts, weight.shape[0]), dtype=torch.float32)


def _excited_shape(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.channels_last)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("squeeze", _squeeze, _key)
    _LIBRARY.impl("excite", _excite, _key)
_LIBRARY.impl("squeeze", _squeezed_shape, "Meta")
_LIBRARY.impl("excite", _excited_shape, "Meta")

SQUEEZE: OpOverload = getattr(torch.ops, _NAMESPACE).squeeze.default
EXCITE: OpOverload = getattr(torch.ops, _NAMESPACE).excite.default


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Everything that decides time and kernels."""

    dtype: str  # torch's name without the prefix
    images: int
    channels: int
    height: int
    width: int
    hidden: int  # features between the two layers
    silu: bool  # else ReLU
    sigmoid: bool  # else the hard one

    @property
    def words(self) -> str:
        """As `explain` calls it."""
        return f"squeeze-and-excitation, {self.dtype}, {self._sizes}, {self.hidden} hidden"

    @property
    def pixels(self) -> int:
        """Of an image."""
        return self.height * self.width

    @property
    def block(self) -> int:
        """Channels of a block. Tuned on an H200."""
        return 16 if self.channels >= 64 else 8

    @property
    def parts(self) -> int:
        """Into how many the hidden layer's sum is divided."""
        across, shares, _ = self.grid(0)
        return across * shares

    def grid(self, kernel: int) -> tuple[int, int, int]:
        """Blocks of channels, shares of the pixels, images: of the first kernel, 0, or the second, 1."""
        across = -(-self.channels // self.block)
        wanted = _BLOCKS[kernel] // (across * self.images)
        return across, max(1, min(wanted, self.pixels // (32 >> kernel))), self.images

    def constants(self, kernel: int) -> dict[str, int]:
        """Of the first kernel, 0, or the second, 1."""
        _, shares, _ = self.grid(kernel)
        share = -(-self.pixels // shares)
        hidden_block = max(16, power_of_two(self.hidden))
        sizes = {"PIXELS": self.pixels, "CHANNELS": self.channels, "HIDDEN": self.hidden, "HIDDEN_BLOCK": hidden_block}
        places = max(8, min(2048 // self.block, power_of_two(share)))
        tile = {"SHARES": shares, "SHARE": share, "PLACES": places, "BLOCK": self.block}
        if kernel == 0:
            return sizes | tile
        rows = max(1, min(power_of_two(self.parts), 4096 // hidden_block))
        chosen = {"PARTS": self.parts, "ROWS": rows, "SILU": int(self.silu), "SIGMOID": int(self.sigmoid)}
        return sizes | chosen | tile

    @property
    def _sizes(self) -> str:
        return f"{self.images}x{self.channels}x{self.height}x{self.width}"

    @property
    def names(self) -> tuple[str, str]:
        """Of the two kernels. Shapes that need different binaries or grids have different names."""
        last = f"{self.dtype}.{self._sizes}.{self.hidden}"
        acts = f"{'silu' if self.silu else 'relu'}.{'sigmoid' if self.sigmoid else 'hardsigmoid'}"
        return f"{PREFIX}.squeeze.{last}", f"{PREFIX}.excite.{last}.{acts}"


Wanted = Callable[[Shape, torch.device], bool]  # whether our kernels are to compute a shape on a device


def wanted_as_in(program: Program) -> Wanted:
    """As in an earlier recording of the same module."""
    names = {task.op for task in program.tasks}
    return lambda shape, _: shape.names[0] in names


def launched(task: Task, device: torch.device) -> Launched | None:
    """Our kernel for a task of either operator; None for any other task, and over memory that it cannot read.

    Raises EngineError if Triton cannot compile it.
    """
    shape = shape_of(task)
    if shape is None:
        return None
    kernel = compiled(shape, capability_of(device))[0 if task.op == str(SQUEEZE) else 1]
    return Launched(kernel=kernel, given=tuple(a for a in task.args if isinstance(a, View)))


def shape_of(task: Task) -> Shape | None:
    """The shape of a task of one of the two operators that our kernel can compute; None for any other task."""
    if task.op not in (str(SQUEEZE), str(EXCITE)) or not isinstance(task.outputs, View):
        return None
    views = [a for a in task.args if isinstance(a, View)]
    x, parts = (views[0], task.outputs) if task.op == str(SQUEEZE) else views[:2]
    weights = views[1:] if task.op == str(SQUEEZE) else views[2:]
    images, channels, height, width = x.shape
    silu, sigmoid = task.args[-2:] if task.op == str(EXCITE) else (True, True)
    shape = Shape(
        dtype=x.dtype,
        images=images,
        channels=channels,
        height=height,
        width=width,
        hidden=parts.shape[2],
        silu=bool(silu),
        sigmoid=bool(sigmoid),
    )
    images_lie = all(lies(view, channels_last=True) for view in (x, task.outputs) if len(view.shape) == 4)
    dense = images_lie and all(is_dense(view) for view in (parts, *weights))
    alike = all(weight.dtype == x.dtype for weight in weights)
    return shape if dense and alike and supported(shape) and parts.shape[1] == shape.parts else None


def supported(shape: Shape) -> bool:
    """Whether our kernels can compute a shape."""
    elements = shape.images * shape.channels * shape.pixels
    return shape.dtype in TYPES and 0 < elements < MOST and 0 < shape.hidden <= MOST_HIDDEN and shape.images < 2**16


@Compiles
def compiled(shape: Shape, capability: int) -> tuple[StaticKernel, StaticKernel]:
    """Compile both kernels for a GPU of this compute capability, such as 90. Needs Triton, but no GPU.

    Raises EngineError if Triton cannot compile them.
    """
    from nimble_jobs.kernels import squeeze_excite_triton

    kind = TYPES[shape.dtype]
    first, second = (Launch(name=name, grid=shape.grid(kernel)) for kernel, name in enumerate(shape.names))
    return (
        static_triton.compiled(
            squeeze_excite_triton.squeeze,
            first,
            capability,
            pointers={"x": kind, "weight": kind, "out": "fp32"},
            constants=shape.constants(0),
        ),
        static_triton.compiled(
            squeeze_excite_triton.excite,
            second,
            capability,
            pointers={"x": kind, "parts": "fp32"} | dict.fromkeys(("bias", "weight", "gate_bias", "out"), kind),
            constants=shape.constants(1),
        ),
    )
