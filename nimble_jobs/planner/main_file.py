"""What a model's own file is called. Key parts show it, and no key depends on it: equal bytes are the same model."""

from __future__ import annotations

from collections.abc import Mapping

FILE_PART = "model.file:"  # what the name of a key part begins with whose value is a file's SHA-256
_SOURCE = "model.source"


def main_file(parts: Mapping[str, str]) -> str | None:
    """The name of an exported program or of a Python file with a factory; None for any other source of a model."""
    scheme, _, rest = parts.get(_SOURCE, "").partition(":")
    name = {"exported": rest, "python": rest.rpartition(":")[0]}.get(scheme, "")
    return name if FILE_PART + name in parts else None


def with_main_file(parts: Mapping[str, str], name: str) -> dict[str, str]:
    """The parts as they were if the model's own file had another name; unchanged where another file has it."""
    before = main_file(parts)
    if before is None or FILE_PART + name in parts:
        return dict(parts)
    scheme, _, rest = parts[_SOURCE].partition(":")
    named = {_SOURCE: f"{scheme}:{name}{rest.removeprefix(before)}", FILE_PART + name: parts[FILE_PART + before]}
    return {part: value for part, value in parts.items() if part != FILE_PART + before} | named
