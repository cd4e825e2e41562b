"""The engine from Python: `Nimble(module)`, prepare, call."""

from nimble_jobs.nimble.interface import Nimble

__all__ = ["Nimble"]
