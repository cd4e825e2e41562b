"""Secrets stay in the environment. They are filled into addresses for sending, and removed from errors."""

from __future__ import annotations

import re
from collections.abc import Mapping

from nimble_jobs.courier.refusals import NotTaken
from nimble_jobs.spec.notify import VARIABLE

_LONG_ENOUGH = 6  # shorter values are ordinary words, not secrets


def filled(text: str, environ: Mapping[str, str]) -> str:
    """`text` with the values of its variables. Raises NotTaken, which names a variable that is not set."""

    def value(found: re.Match[str]) -> str:
        name = found[1]
        if not environ.get(name):
            raise NotTaken(f"the variable {name} is not set in the environment of the sending process")
        return environ[name]

    return VARIABLE.sub(value, text)


def hidden(text: str, environ: Mapping[str, str]) -> str:
    """`text` with every value of a variable replaced by the variable's name."""
    for name, value in sorted(environ.items(), key=lambda item: -len(item[1])):
        if len(value) >= _LONG_ENOUGH and value in text:
            text = text.replace(value, f"${{{name}}}")
    return text
