"""The types of fields of `cron`, and of those that templates of the tick may stand in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator, WithJsonSchema

from nimble_jobs.spec.units import BadValue
from nimble_jobs.ticks import BadTick, Expression, parse_moment, placeholders
from nimble_jobs.ticks import moments as written


def _checked(check: Callable[[str], object]) -> Callable[[str], str]:
    """A type whose text is kept unchanged after `check` has accepted it."""

    def validate(value: str) -> str:
        try:
            check(value)
        except BadTick as e:
            raise BadValue(e.problem, e.expected) from None
        return value

    return validate


check_templates = _checked(placeholders)
"""Raises BadValue. To be called before a path is made absolute, which would take off `..` in a template."""

ExpressionText = Annotated[str, AfterValidator(_checked(lambda text: Expression.parse(text, "UTC")))]
ZoneName = Annotated[str, AfterValidator(_checked(lambda text: Expression.parse("@daily", text)))]
MomentText = Annotated[
    str,
    AfterValidator(_checked(lambda text: parse_moment(text, "UTC"))),
    WithJsonSchema({"type": "string", "pattern": f"^(?:{written.PATTERN})$"}),
]
TEMPLATED = AfterValidator(check_templates)
