"""How every picture of an input is resized and cropped, as a value."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nimble_jobs.resizing import Interpolation

MAX_PIXELS = 89_478_485  # Pillow's own limit (256 MiB as RGB), where it merely warns; more is taken for an attack


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How every picture of an input becomes uint8 [*size, channels]."""

    channels: int  # 1 or 3
    size: tuple[int, int]  # height, width of the result
    resize: tuple[int, int] | None = None  # height, width
    center_crop: tuple[int, int] | None = None  # height, width
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
    def of_whole(self) -> bool:
        """Whether pictures must not be decoded smaller: those for CLIP keep the pixels of its own processor."""
        return self.shortest_edge is not None and self.interpolation == "bicubic"

    def resized(self, height: int, width: int) -> tuple[int, int] | None:
        """Height and width to which an upright picture of this size is resized; None: it stays as it is."""
        if self.shortest_edge is None:
            return self.resize
        return scaled(self.shortest_edge, height, width)

    def fits(self, height: int, width: int) -> bool:
        """Whether a picture of this size in pixels gives a result of the right size."""
        size = self.resized(height, width) or (height, width)
        if max(height * width, size[0] * size[1]) > MAX_PIXELS:
            return False
        if self.center_crop is not None:
            return size[0] >= self.center_crop[0] and size[1] >= self.center_crop[1]
        return size == self.size


def scaled(shortest_edge: int, height: int, width: int) -> tuple[int, int]:
    """Height and width of a picture whose shorter edge becomes `shortest_edge`; the longer one is rounded down."""
    shorter = min(height, width)
    return shortest_edge * height // shorter, shortest_edge * width // shorter
