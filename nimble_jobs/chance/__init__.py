"""Repeatable random numbers: words for each record, and the random parts of pictures that they choose."""

from nimble_jobs.chance.crops import RandomCrops
from nimble_jobs.chance.words import below, draws, unit

__all__ = ["RandomCrops", "below", "draws", "unit"]
