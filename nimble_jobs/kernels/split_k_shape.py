"""Sums that `split_k` computes: their shapes, the tiles and parts that are worth trying, the kernels' constants."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from nimble_jobs.kernels import bands
from nimble_jobs.kernels.static_triton import MOST, power_of_two

PREFIX = "triton.split_k"
TILES = {  # by name: blocks of pixels, features and channels, warps, stages; the first whose channels fit is used
    "64x64x64": (64, 64, 64, 4, 4),
    "64x64x32": (64, 64, 32, 4, 4),
    "64x64x16": (64, 64, 16, 4, 4),
}
_LARGE = {  # for dilated convolutions of many pixels, the widest first; in each way so many blocks a multiprocessor
    "128x256x64": (1.0,),
    "128x128x64": (1.5, 2.0),
    "128x64x64": (1.5, 2.0),
}
_ALL_TILES = TILES | {
    "128x256x64": (128, 256, 64, 8, 3),
    "128x128x64": (128, 128, 64, 8, 3),
    "128x64x64": (128, 64, 64, 4, 3),
}
_ROWS = "-rows"  # ends the name of a tile over whole rows of the window, for pictures of few channels
_WIDEST_ROW = 64  # values
_MOST_PIXELS = 1 << 15  # read by whole rows; with more, writing results in fp32 takes longer than that saves
MOST_PARTS = 18
_MOST_LARGE_PARTS = 8
_LEFT_OUT = 0.1  # of the windows' pixels: what makes up for fp32 results if the tiles fill the device anyway
_SHORTEST = 768  # values in a sum that is worth dividing
_SHORTEST_WINDOW = 128  # the same, for windows of several pixels: libraries take longer there
_BLOCKS = 132  # a block for each multiprocessor of an H100 or H200


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Everything that decides its time. A product is a convolution of one pixel, over a picture of one column."""

    dtype: str  # torch's name without the prefix
    images: int
    channels: int
    height: int
    width: int
    features: int
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)

    @property
    def out(self) -> tuple[int, int]:
        """Height and width of the result."""
        rows, columns = self.axes
        return rows.out, columns.out

    @property
    def axes(self) -> tuple[bands.Axis, bands.Axis]:
        """Down and across."""
        down, across = (
            bands.Axis(
                size=size,
                out=(size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1,
                kernel=kernel,
                stride=stride,
                padding=padding,
                dilation=dilation,
            )
            for size, kernel, stride, padding, dilation in zip(
                (self.height, self.width), self.kernel, self.stride, self.padding, self.dilation, strict=True
            )
        )
        return down, across

    @property
    def dilated(self) -> bool:
        """Whether there are gaps in its window."""
        return any(kernel > 1 < dilation for kernel, dilation in zip(self.kernel, self.dilation, strict=True))

    @property
    def pixels(self) -> int:
        """Of the results of all images."""
        return self.images * math.prod(self.out)

    @property
    def ways(self) -> tuple[str, ...]:
        """A tile and a number of parts that are worth trying; none if our kernel cannot compute it, or need not."""
        sizes = (self.images, self.channels, self.features, *self.out)
        if self.dtype not in ("float16", "bfloat16") or min(sizes) < 1 or self.features % 8:
            return ()
        if (
            max(self.images * self.height * self.width * self.channels, MOST_PARTS * self.pixels * self.features)
            >= MOST
        ):
            return ()
        taps, row = math.prod(self.kernel), self.kernel[1] * self.channels
        tile = next((name for name, (_, _, block, _, _) in TILES.items() if self.channels % block == 0), None)
        with_rows = taps > 1 and row <= _WIDEST_ROW and self.pixels <= _MOST_PIXELS and not self.dilated
        if tile is None and with_rows:
            tile = f"64x64x{max(16, power_of_two(row))}{_ROWS}"
        elif tile is None or taps * self.channels < (_SHORTEST if taps == 1 else _SHORTEST_WINDOW):
            return ()
        fewest = 1 if tile.endswith(_ROWS) else 2
        if fewest > 1 and fewest * self.tiles(tile) > _BLOCKS:
            return self._large_ways if self.dilated else ()
        parts = self._parts(tile, fewest, MOST_PARTS, _BLOCKS)
        return () if parts is None else (f"{tile}/{parts}",)

    @property
    def _large_ways(self) -> tuple[str, ...]:
        """With the larger tiles, if this is a dilated convolution."""
        widest = max(64, power_of_two(self.features))
        names = [name for name in _LARGE if tile_of(name)[1] <= widest and self.channels % tile_of(name)[2] == 0][:2]
        ways = []
        for name in names:
            # Parts gain nothing then, and cost results in fp32. Only what is not read can make up for that.
            full = self.tiles(name) > max(_LARGE[name]) * _BLOCKS
            if full and _share_read(self, tile_of(name)[0]) > 1 - _LEFT_OUT:
                continue
            for each in _LARGE[name]:
                ways.append(f"{name}/{self._parts(name, 1, _MOST_LARGE_PARTS, each * _BLOCKS)}")
        return tuple(dict.fromkeys(ways))

    def _parts(self, tile: str, fewest: int, most: int, blocks: float) -> int | None:
        """The number of parts with which there are nearest to so many blocks; None if no number divides the sum."""
        steps = self.steps(tile)
        possible = [n for n in range(fewest, min(steps, most) + 1) if self.dilated or steps % n == 0]
        return min(possible, key=lambda n: abs(math.log(n * self.tiles(tile) / blocks)), default=None)

    def columns(self, tile: str) -> tuple[bands.Band, ...]:
        """The bands of columns of a dilated convolution."""
        return _bands(self, tile_of(tile)[0])

    def tiles(self, tile: str) -> int:
        """The number of tiles of the result."""
        return math.prod(self.grid(tile))

    def grid(self, tile: str) -> tuple[int, int]:
        """The number of tiles, over pixels and over features."""
        pixels, features = tile_of(tile)[:2]
        if self.dilated:
            lines = self.images * self.out[0]
            over_pixels = sum(-(-lines * width // pixels) for _, width in self.columns(tile))
        else:
            over_pixels = -(-self.pixels // pixels)
        return over_pixels, -(-self.features // features)

    def steps(self, tile: str) -> int:
        """Blocks of channels, or rows of the window, in a sum."""
        if tile.endswith(_ROWS):
            return self.kernel[0]
        return math.prod(self.kernel) * self.channels // tile_of(tile)[2]

    def name(self, way: str) -> str:
        """The kernel's name, which tells binaries and grids apart."""
        picture = f"{self.images}x{self.channels}x{self.height}x{self.width}x{self.features}"
        pairs = (self.kernel, self.stride, self.padding, *((self.dilation,) if self.dilated else ()))
        window = "-".join("x".join(map(str, pair)) for pair in pairs)
        return f"{PREFIX}.{self.dtype}.{picture}.{window}.{way.replace('/', '-')}"


def parts_of(way: str) -> int:
    """The number of parts of a way."""
    return int(way.rpartition("/")[2])


def tile_of(name: str) -> tuple[int, int, int, int, int]:
    """Blocks of pixels, features and channels, warps and stages."""
    return _ALL_TILES[name.removesuffix(_ROWS)]


@functools.lru_cache(maxsize=1024)
def _bands(shape: Shape, pixels: int) -> tuple[bands.Band, ...]:
    return bands.best(shape.images, *shape.axes, pixels)


@functools.lru_cache(maxsize=1024)
def _share_read(shape: Shape, pixels: int) -> float:
    """Of the windows of tiles of so many pixels, those of padding included."""
    read = sum(bands.tiles(shape.images, *shape.axes, _bands(shape, pixels), pixels))
    return read * pixels / (math.prod(shape.kernel) * shape.pixels)


def product_shape(dtype: str, x: tuple[int, ...], weight: tuple[int, ...]) -> Shape:
    """Of x [..., inputs] and weight [features, inputs]."""
    return Shape(dtype=dtype, images=1, channels=weight[1], height=math.prod(x[:-1]), width=1, features=weight[0])


def constants(shape: Shape, way: str) -> dict[str, int]:
    """Of the kernel."""
    tile = way.rpartition("/")[0]
    pixels, features, channels, _, _ = tile_of(tile)
    common = {
        "OUT_HEIGHT": shape.out[0],
        "OUT_WIDTH": shape.out[1],
        "HEIGHT": shape.height,
        "WIDTH": shape.width,
        "CHANNELS": shape.channels,
        "FEATURES": shape.features,
        "KERNEL_HEIGHT": shape.kernel[0],
        "KERNEL_WIDTH": shape.kernel[1],
        "STRIDE_Y": shape.stride[0],
        "STRIDE_X": shape.stride[1],
        "PADDING_Y": shape.padding[0],
        "PADDING_X": shape.padding[1],
        "PIXEL_BLOCK": pixels,
        "FEATURE_BLOCK": features,
        "CHANNEL_BLOCK": channels,
    }
    if not shape.dilated:
        steps = shape.steps(tile) // parts_of(way)
        return {"PIXELS": shape.pixels, **common, "STEPS": steps, "ROWS": int(tile.endswith(_ROWS))}
    found = {
        "IMAGES": shape.images,
        **common,
        "DILATION_Y": shape.dilation[0],
        "DILATION_X": shape.dilation[1],
        "PARTS": parts_of(way),
    }
    divided = shape.columns(tile)
    for number in range(bands.MOST_BANDS):
        first, width = divided[number] if number < len(divided) else (0, 0)
        found |= {f"FIRST_{number}": first, f"WIDTH_{number}": width}
    return found
