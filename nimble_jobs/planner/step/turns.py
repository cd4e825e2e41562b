"""Repeats the check of a step on fresh input where a single sign decides about gradients.

In plain fp32 a gradient of a right step differs from eager's by 1e-5. But now and then rounding decides the sign of a
value at a ReLU, and all gradients below it change by a percent or more. Another input has no such value there. What is
wrong with a step stays wrong with any input, or comes and goes with the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from nimble_jobs.engine import verify
from nimble_jobs.planner.step.compare import GradientDiffers

T = TypeVar("T")
MOST_TURNS = verify.ROUNDS + 6
_EDGE = 0.1  # the largest relative norm that a sign may be the reason of
_SAME = 0.1  # share by which the norm of a repeated difference may be another one


def in_turns(turn: Callable[[int], T], *, rough: bool) -> list[T]:
    """What `turn` returns for `verify.ROUNDS` turns, each on input of its own, by number.

    Up to `MOST_TURNS` are made, while gradients differ by little and the same replay differs in the same way again; not
    if the type is `rough`: then eager was asked what rounding does. Raises what `turn` raises otherwise.
    """
    found: list[T] = []
    for number in range(MOST_TURNS):
        try:
            found.append(turn(number))
        except GradientDiffers as e:
            left = MOST_TURNS - number - 1
            if rough or not e.repeats or e.error is None or e.error > _EDGE or left < verify.ROUNDS - len(found):
                raise
        if len(found) == verify.ROUNDS:
            break
    return found


def confirm(error: GradientDiffers, again: Callable[[], object]) -> None:
    """Note whether the same replay, which `again` repeats and compares, differs in the same way."""
    try:
        again()
    except GradientDiffers as other:
        if error.error is not None and other.error is not None:
            error.repeats = abs(other.error - error.error) <= _SAME * error.error
