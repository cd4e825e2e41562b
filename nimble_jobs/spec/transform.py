"""The part of a spec that says how each record is prepared for the model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nimble_jobs.spec.fields import Frozen, HeightWidth, Number, Positive


class TransformSpec(Frozen):
    """How each record is prepared for the model."""

    resize: HeightWidth | None = Field(default=None, description="Size in pixels: one number, or [height, width].")
    shortest_edge: int | None = Field(
        default=None, ge=1, description="Size of the shorter edge in pixels, instead of resize; the shape is kept."
    )
    interpolation: Literal["bilinear", "bicubic"] | None = Field(
        default=None, description="How encoded pictures are resized; by default bilinear."
    )
    center_crop: HeightWidth | None = Field(default=None, description="Size kept around the centre, after resizing.")
    channels: Literal[1, 3] | None = Field(default=None, description="Channels the model wants; grey is repeated.")
    scale: Positive | None = Field(
        default=None, description="Raw values are multiplied by this; by default 1/255 for 8-bit data, otherwise 1."
    )
    mean: tuple[Number, ...] | None = Field(
        default=None, min_length=1, description="Mean to subtract, for each channel."
    )
    std: tuple[Positive, ...] | None = Field(
        default=None, min_length=1, description="Standard deviation to divide by, for each channel."
    )
    layout: Literal["chw", "hwc"] | None = Field(
        default=None, description="Order of the dimensions of stored arrays; by default inferred from the shape."
    )
