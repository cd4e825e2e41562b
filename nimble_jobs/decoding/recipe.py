"""How every picture of an input is resized and cropped, as a value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Interpolation = Literal["bilinear", "bicubic"]

MAX_PIXELS = 89_478_485  # Pillow's own limit (256 MiB as RGB), where it merely warns; more is taken for an attack


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How every picture of an input becomes uint8 [*size, channels]."""

    channels: int  # 1 or 3
    resize: tuple[int, int] | None  # height, width
    center_crop: tuple[int, int] | None  # height, width
    size: tuple[int, int]  # height, width of the result
    shortest_edge: int | None = None  # pixels of the shorter edge, instead of `resize`
    interpolation: Interpolation = "bilinear"

    @property
    def shape(self) -> tuple[int, int, int]:
        return (*self.size, self.channels)

    @property
    def nbytes(self) -> int:
        """Bytes of one result."""
        return self.size[0] * self.size[1] * self.channels

    @property
    def of_parts(self) -> Recipe:
        """The recipe for parts of pictures, which are resized to the same result."""
        return replace(self, resize=self.size, center_crop=None, shortest_edge=None)

    @property
    def on_host_only(self) -> str | None:
        """Why a device cannot resize so; None if it can."""
        if self.interpolation != "bilinear":
            return f"the device resizes bilinearly, and not {self.interpolation}"
        return (
            "the device resizes all pictures to one size, and not by their shortest edge"
            if self.shortest_edge
            else None
        )

    def resized(self, height: int, width: int) -> tuple[int, int] | None:
        """Height and width to which an upright picture of this size is resized; None: it stays as it is."""
        if self.shortest_edge is None:
            return self.resize
        return scaled(self.shortest_edge, height, width)

    def fits(self, height: int, width: int) -> bool:
        """Whether a picture of this size in pixels gives a result of the right size."""
        if height * width > MAX_PIXELS:
            return False
        if self.resize is not None:
            return True
        if self.center_crop is not None:
            return height >= self.center_crop[0] and width >= self.center_crop[1]
        return (height, width) == self.size


def scaled(shortest_edge: int, height: int, width: int) -> tuple[int, int]:
    """Height and width of a picture whose shorter edge becomes `shortest_edge`; the longer one is rounded down."""
    if height < width:
        return shortest_edge, shortest_edge * width // height
    return shortest_edge * height // width, shortest_edge
