"""How many rows go in one transaction: as many as take a tenth of a second."""

from __future__ import annotations

TARGET_S = 0.1


class Pace:
    """A number that follows how long the last part took."""

    def __init__(self, *, first: int, least: int, most: int) -> None:
        self.size, self._least, self._most = first, least, most

    def took(self, seconds: float) -> None:
        """The part that was just done took so long. At most twice as many come next."""
        factor = min(2.0, TARGET_S / max(seconds, 1e-6))
        self.size = max(self._least, min(self._most, int(self.size * factor)))
