"""Output for machines goes to stdout, messages for people go to stderr. Rich is used on terminals only."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
import textwrap
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nimble_jobs.errors import NimbleError, SpecError

if TYPE_CHECKING:
    from rich.console import Console


# Characters that control a terminal or cannot be encoded: control characters except tab and line feed, lone surrogates.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def visible(text: str) -> str:
    """The text with such characters escaped as in JSON, since stored text may come from anywhere."""
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def emit(text: str) -> None:
    """Print one or more lines on stdout."""
    sys.stdout.write(visible(text) + "\n")


def emit_json(value: Any) -> None:
    """Print `value` as indented JSON on stdout."""
    emit(_rows(value) or json.dumps(value, indent=2, ensure_ascii=False, default=_plain))


def _rows(value: Any) -> str | None:
    """The same text for a list of flat objects, several times faster: Python's C encoder knows no indentation.

    None for any other value.
    """
    flat = (str, int, float, bool, type(None))
    if not isinstance(value, list) or not value:
        return None
    if not all(isinstance(row, dict) and row and all(isinstance(v, flat) for v in row.values()) for row in value):
        return None
    encode = json.JSONEncoder(ensure_ascii=False, separators=(",\n    ", ": ")).encode
    return "[\n  " + ",\n  ".join("{\n    " + encode(row)[1:-1] + "\n  }" for row in value) + "\n]"


def note(text: str) -> None:
    """Print a message on stderr, after flushing stdout. On terminals it is wrapped between words."""
    shown = visible(text)
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        shown = "\n".join(_wrapped(line, width) for line in shown.split("\n"))
    sys.stdout.flush()
    sys.stderr.write(shown + "\n")
    sys.stderr.flush()


def warn(text: str) -> None:
    """As `note`, but highlighted on a terminal."""
    if not sys.stderr.isatty():
        note(text)
        return
    from rich.text import Text

    sys.stdout.flush()
    error_console().print(Text(visible(text), style="bold red"))


def refusal(error: NimbleError) -> None:
    """Print the lines of an error on stderr. Lines about a spec begin with its file."""
    prefix = "" if isinstance(error, SpecError) else "nimble-jobs: "
    note("\n".join(prefix + line for line in str(error).splitlines()))


def _wrapped(line: str, width: int) -> str:
    """Lines that fit, indented like the first; a word longer than a line stays whole."""
    if len(line) <= width:
        return line
    words = line.lstrip()
    indent = line[: len(line) - len(words)]
    return textwrap.fill(
        words, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def on_terminal() -> bool:
    return sys.stdout.isatty()


def console() -> Console:
    """Rich on stdout. NO_COLOR and COLUMNS are honoured."""
    from rich.console import Console

    return Console(highlight=False)


def error_console() -> Console:
    """Rich on stderr."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if hasattr(value, "item"):  # a numpy scalar
        return value.item()
    raise TypeError(f"{type(value).__name__} has no JSON form")
