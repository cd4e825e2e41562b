"""Ray (extra `ray`): workers as actors, and `NimbleScorer` for Ray Data. Importing this loads neither Ray nor torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nimble_jobs.ray.scorer import NimbleScorer

__all__ = ["NimbleScorer"]


def __getattr__(name: str) -> Any:
    if name == "NimbleScorer":  # loads torch, which the command that starts workers does not need
        from nimble_jobs.ray.scorer import NimbleScorer

        return NimbleScorer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
