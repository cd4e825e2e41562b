"""The types of fields that only the configuration has: sizes, hours of the day, folders, hosts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote_plus, urlsplit

from pydantic import AfterValidator, BeforeValidator, PlainValidator, WithJsonSchema

from nimble_jobs.addresses import SECRET_OPTIONS, is_address, normal, problem_of
from nimble_jobs.spec import paths
from nimble_jobs.spec.fields import Seconds, based
from nimble_jobs.spec.units import BadValue, format_duration, parse_bytes, show, wrong

_DATABASES = ("postgresql+psycopg://", "sqlite://")
_CLOCK = re.compile(r"([01][0-9]|2[0-3]):[0-5][0-9]")
_SIZE_PATTERN = r"^[0-9]+(?:\.[0-9]+)? ?[A-Za-z]*$"
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_HOST = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9a-f:]+\])(?::([0-9]{{1,5}}))?")


def _daily(value: object) -> str:
    if value == "off" or (isinstance(value, str) and _CLOCK.fullmatch(value)):
        return str(value)
    raise BadValue(wrong(value), "an hour of the day, UTC, such as 03:30, or off")


def _host(text: str) -> str:
    matched = _HOST.fullmatch(text.lower())
    if len(text) > 255 or matched is None or int(matched[1] or 1) not in range(1, 65_536):
        raise BadValue(f"found {show(text)}", "a host such as hooks.example.org, or localhost:8080")
    return text.lower()


def _endpoint(text: str) -> str:
    expected = "an address such as http://localhost:4318, without user, password or query"
    try:
        parts = urlsplit(text)
        known = parts.scheme in ("http", "https") and _HOST.fullmatch(parts.netloc.lower()) is not None
        sound = known and parts.port != 0
    except ValueError:  # a port that is none
        sound = False
    if not sound or parts.query or parts.fragment or not text.isprintable() or " " in text or len(text) > 2048:
        raise BadValue("found an address that cannot be used" if "@" in text else f"found {show(text)}", expected)
    return text


# User and password may hold any character. All from the first : to the last @ counts as the password, unless a user and
# a host come before it, or the slash of a path.
_PASSWORD = re.compile(r"^(?!/|[^:@]*@(?:\[|[^:@]*(?::\d+)?/))([^:]*):.*@", re.DOTALL)


def without_password(address: str) -> str:
    """A database's address without the password, in its place or among the options."""
    scheme, _, rest = address.partition("://")
    place, _, query = _PASSWORD.sub(r"\1@", rest).partition("?")
    options = "&".join(each for each in query.split("&") if not _is_secret(each))
    return f"{scheme}://{place}" + (f"?{options}" if options else "")


def with_stars(address: str) -> str:
    """A database's address to show, with *** for the password, in its place or among the options."""
    scheme, _, rest = address.partition("://")
    place, mark, query = _PASSWORD.sub(r"\1:***@", rest).partition("?")
    options = "&".join(f"{each.partition('=')[0]}=***" if _is_secret(each) else each for each in query.split("&"))
    return f"{scheme}://{place}{mark}{options}"


def _is_secret(option: str) -> bool:
    return unquote_plus(option.partition("=")[0]).lower() in SECRET_OPTIONS


def _database(text: str) -> str:
    """Problems never show the address, which may hold a password."""
    if not text.startswith(_DATABASES) or not text.isprintable() or len(text) > 2048:
        raise BadValue("found an address of another kind", f"{_DATABASES[0]}USER@HOST/NAME, or {_DATABASES[1]}//PATH")
    if without_password(text) != text:
        raise BadValue("found a password", "an address without one; the password belongs in ~/.pgpass or PGPASSWORD")
    return text


def _folder(text: str, base: Path | None) -> str:
    if text.startswith("~"):
        raise BadValue(f"found {show(text)}, but ~ is not expanded", "an absolute path, or one relative to config.yaml")
    return paths.absolute(text, base)


def _place(text: str, base: Path | None) -> str:
    if not is_address(text):
        return _folder(text, base)
    if problem := problem_of(text):
        raise BadValue(*problem)
    return normal(text)


def _positive(seconds: float) -> float:
    """Raises BadValue for 0."""
    if seconds == 0:
        raise BadValue("found 0s", "more than 0s")
    return seconds


def at_most(longest_s: float) -> AfterValidator:
    """Raises BadValue for a longer duration."""

    def validate(seconds: float) -> float:
        if seconds > longest_s:
            raise BadValue(f"found {format_duration(seconds)}", f"at most {format_duration(longest_s)}")
        return seconds

    return AfterValidator(validate)


def _size(value: object) -> int:
    if (size := parse_bytes(value)) == 0:
        raise BadValue("found 0", "more than 0 bytes")
    return size


Size = Annotated[
    int,
    BeforeValidator(_size),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1},
                {"type": "string", "pattern": _SIZE_PATTERN},
            ]
        }
    ),
]
Daily = Annotated[
    str, PlainValidator(_daily), WithJsonSchema({"type": "string", "pattern": f"^(?:off|{_CLOCK.pattern})$"})
]
DatabaseAddress = Annotated[str, AfterValidator(_database)]
Endpoint = Annotated[str, AfterValidator(_endpoint)]
Folder = Annotated[str, based(_folder)]
Place = Annotated[str, based(_place)]
Limit = Annotated[Seconds, AfterValidator(_positive)]
Host = Annotated[str, AfterValidator(_host)]
