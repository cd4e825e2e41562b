"""Text that the database can store: valid Unicode without NUL bytes, of bounded length."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Dialect, Text
from sqlalchemy.types import TypeDecorator

LIMIT_BYTES = 16 * 1024  # of one text, in UTF-8
_ESCAPED = re.compile(r"\\(?:\\|u([0-9a-f]{4}))")


def words(text: str, *, limit_bytes: int = LIMIT_BYTES) -> str:
    """`text` in a form that can be stored and printed anywhere.

    Lone surrogates and NULs become escapes such as `\\udc80` and `\\x00`. What is over `limit_bytes` is cut off, and
    the end says how much that was: the log has it all. Applying this twice changes nothing.
    """
    if len(text) <= limit_bytes and text.isascii() and "\0" not in text:
        return text
    data = text.replace("\0", "\\x00").encode("utf-8", "backslashreplace")
    if len(data) <= limit_bytes:
        return data.decode("utf-8")
    kept = limit_bytes
    while True:  # the count of omitted bytes must fit too
        note = f" … ({len(data) - kept} more bytes; the job's log has all of it: nimble-jobs logs ID)"
        head = data[:kept].decode("utf-8", "ignore")
        if len(head.encode()) + len(note.encode()) <= limit_bytes:
            return head + note
        kept -= len(head.encode()) + len(note.encode()) - limit_bytes


def plain(value: Any) -> Any:
    """A JSON value whose texts are all `words`."""
    match value:
        case str():
            return words(value)
        case None | bool() | int() | float():
            return value
        case Mapping():
            return {words(str(k)): plain(v) for k, v in value.items()}
        case list() | tuple():
            return [plain(v) for v in value]
        case _:
            return value


class Words(TypeDecorator[str]):
    """A column of free text. Values that are written or compared go through `words`."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else words(str(value))


class FileName(TypeDecorator[str]):
    """A column of file names, which may be invalid Unicode. Unlike in `Words`, different names stay different."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None or (value.isascii() and "\\" not in value):
            return value
        return value.replace("\\", "\\\\").encode("utf-8", "backslashreplace").decode()

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None or "\\" not in value:
            return value
        return _ESCAPED.sub(lambda found: chr(int(found[1], 16)) if found[1] else "\\", value)
