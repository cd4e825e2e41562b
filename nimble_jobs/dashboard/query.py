"""The parameters of a request, checked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from nimble_jobs.errors import NotFound, UsageError
from nimble_jobs.store.ids import is_id

_LONGEST = 200  # characters of a parameter that is text
_LARGEST = 2**63 - 1


class BadQuery(UsageError):
    """A parameter of the request is not valid."""


@dataclass(frozen=True, kw_only=True)
class Query:
    """Parameters from the path, the query, and the JSON body of a change."""

    path: Mapping[str, str] = field(default_factory=dict)
    given: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)

    def job(self) -> str:
        """The id of a job in the path. Raises NotFound for a text that cannot be one."""
        if not is_id(self.path["id"]):
            raise NotFound("no job has this id")
        return self.path["id"]

    def limit(self, default: int = 100, most: int = 500) -> int:
        """How many rows to answer with. Raises BadQuery."""
        return self.number("limit", default, least=1, most=most)

    def number(self, name: str, default: int, *, least: int = 0, most: int = _LARGEST) -> int:
        """A whole number. Raises BadQuery."""
        text = self.given.get(name)
        if text is None:
            return default
        number = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
        if not least <= number <= most:
            raise BadQuery(f"{name}: found {_shown(text)}; expected a whole number from {least:,} to {most:,}")
        return number

    def key(self, name: str) -> int | None:
        """A position in a listing, as `next` of the page before gave it. Raises BadQuery."""
        return self.number(name, 0) if name in self.given else None

    def word(self, name: str, allowed: Collection[str]) -> str | None:
        """One of these words; None without the parameter. Raises BadQuery."""
        text = self.given.get(name) or None
        if text is not None and text not in allowed:
            raise BadQuery(f"{name}: found {_shown(text)}; expected one of {', '.join(allowed)}")
        return text

    def text(self, name: str) -> str | None:
        """Free text; None if it is missing or blank. Raises BadQuery if it is too long."""
        text = self.given.get(name, "").strip()
        if len(text) > _LONGEST:
            raise BadQuery(f"{name}: found {len(text):,} characters; expected at most {_LONGEST}")
        return text or None

    def flag(self, name: str) -> bool:
        """A yes or no from the body; no without it. Raises BadQuery."""
        value = self.body.get(name, False)
        if not isinstance(value, bool):
            raise BadQuery(f"{name}: expected true or false")
        return value


def _shown(text: str) -> str:
    """What was found, short and in ASCII. Angle brackets and quotes are left out, so that it can never be markup."""
    plain = "".join(c if c.isascii() and (c.isalnum() or c in " ._:-+/") else "?" for c in text)
    return f"{plain[:40]}..." if len(plain) > 40 else plain or "nothing"
