"""The names by which kernels and rewrites of our own can be switched off, in a spec, a key and a stored schedule."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Self

PART = "schedule.kernels"  # of keys; absent if nothing is switched off
_WITHOUT = "without "


class Kernel(StrEnum):
    """What a search may use, each with what it is. Whatever is used has been measured to be faster first."""

    says: str

    def __new__(cls, name: str, says: str = "") -> Self:
        member = str.__new__(cls, name)
        member._value_ = name
        member.says = says
        return member

    ATTENTION = "attention", "Attention in one kernel, without masks that hide nothing."
    DEPTHWISE = "depthwise", "Depthwise convolutions in a kernel of our own."
    DEPTHWISE_ACTIVATION = "depthwise-activation", "Depthwise convolutions with bias and activation in one kernel."
    POINTWISE = (
        "pointwise",
        "Convolutions of single pixels, with a bias, an activation or a sum, in one kernel of our own.",
    )
    SEPARABLE = "separable", "Depthwise-separable convolutions in one kernel of our own instead of two."
    SQUEEZE_EXCITE = "squeeze-excite", "Squeeze-and-excitation in two kernels."
    LINEAR_GELU = "linear-gelu", "Linear layers with GELU in one kernel."
    PATCHES = "patches", "Convolutions that cut pictures into patches, as matrix products."
    SPLIT_K = "split-k", "Long sums of convolutions and linear layers, divided over the blocks of a GPU."
    FUSED_CONVOLUTION = "fused-convolution", "Convolutions with their addition and ReLU in one kernel of cuDNN's."
    CROWDED = "crowded", "Kernels chosen by their time beside others, where many streams fill the GPU."
    PRODUCT = "product", "Convolutions of single pixels, as matrix products."
    PACKED = "packed-weights", "oneDNN's convolutions and linear layers over weights that it lays out once, on a CPU."
    MERGED = "merged", "Linear layers that read the same, over one weight."
    FOLDED = "folded", "Batch normalisations, folded into the convolutions before them."


Without = frozenset[Kernel]  # what is switched off
NOTHING: Without = frozenset()


def listed(without: Iterable[str]) -> str:
    """The names of what is switched off, in alphabetical order."""
    return ", ".join(sorted(without))


def key_parts(without: Without) -> dict[str, str]:
    """The part of a key; none if nothing is switched off, so that keys stay what they were without the switches."""
    return {PART: _WITHOUT + listed(without)} if without else {}


def switched_off(part: str | None) -> Without:
    """Inverse of `key_parts`, given the value of the part. Raises ValueError for any other text."""
    if part is None:
        return NOTHING
    if not part.startswith(_WITHOUT):
        raise ValueError(f"{PART}: found {part!r}; expected {_WITHOUT!r} and names")
    return frozenset(Kernel(name) for name in part.removeprefix(_WITHOUT).split(", "))
