"""A request as the rules see it, and their refusals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

CHANGING = ("POST",)
METHODS = ("GET", "HEAD", *CHANGING)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The parts of a request on which the rules decide. Names of headers are in lower case."""

    method: str
    path: str
    query: str = ""  # without the question mark
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, scope: Mapping[str, Any]) -> Asked:
        """From an ASGI scope."""
        headers = ((name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"])
        return cls(
            method=scope["method"],
            path=scope["path"],
            query=scope["query_string"].decode("latin-1"),
            headers=tuple(headers),
        )

    def all(self, name: str) -> list[str]:
        """Every value of a header."""
        return [value for known, value in self.headers if known == name]

    def one(self, name: str) -> str | None:
        """The value of a header that is there exactly once; else None."""
        values = self.all(name)
        return values[0] if len(values) == 1 else None

    def parameter(self, name: str) -> str | None:
        """The value of a query parameter that is there exactly once; else None."""
        values = [value for known, value in parse_qsl(self.query, keep_blank_values=True) if known == name]
        return values[0] if len(values) == 1 else None

    @property
    def changes(self) -> bool:
        """Whether the request asks for a change."""
        return self.method in CHANGING


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Why a request is not answered."""

    status: int  # of HTTP
    kind: str  # for programs
    message: str  # for people; holds nothing that the request sent
