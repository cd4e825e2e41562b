"""Errors in the texts of a timer. Each says what was found and what was expected."""

from __future__ import annotations

from nimble_jobs.errors import UsageError


class BadTick(UsageError):
    """A text of a timer is not valid."""

    def __init__(self, problem: str, expected: str = "") -> None:
        self.problem, self.expected = problem, expected
        super().__init__(f"{problem}; expected {expected}" if expected else problem)


class BadExpression(BadTick):
    """Not an expression of five fields, nor one of the names for them."""


class BadZone(BadExpression):
    """Not the name of a time zone."""


class BadMoment(BadTick):
    """Not a date, or a date and a time of day."""


class BadTemplate(BadTick):
    """Not a template of the tick."""
