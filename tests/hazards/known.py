"""Hazards that do not end yet as they should."""

OPEN = frozenset({})
