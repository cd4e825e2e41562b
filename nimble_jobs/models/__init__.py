"""What turns `model.source` into a module.

This package imports without torch; what builds modules is imported by its own name, `nimble_jobs.models.build`.
"""

from __future__ import annotations

from nimble_jobs.models.identity import identity, random_weights, weights_identity

__all__ = ["identity", "random_weights", "weights_identity"]
