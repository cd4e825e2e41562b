"""The names of the programs that a schedule, or several that belong together, are made of."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """What a program is for."""

    FORWARD = "forward"  # a forward pass; with BACKWARD, the first half of a pair
    BACKWARD = "backward"
    ACCUMULATE = "accumulate"  # a training step for a batch whose gradients only add up
    UPDATE = "update"  # a training step for a batch that ends with an update of the weights
    VALIDATION = "validation"  # a forward pass over weights that a training moves
