"""File names of a model and of a loss in key parts. Parts show the name of the file that the spec names, but no key
depends on it, because equal bytes are the same model.
"""

from __future__ import annotations

from collections.abc import Mapping

LOSS = "train.loss"
FILES = {"model.source": "model.file:", LOSS: f"{LOSS}.file:"}  # how names of parts with digests of files begin


def file_of(part: str) -> str | None:
    """The file whose SHA-256 this key part holds; None for other parts."""
    return next((part.removeprefix(begin) for begin in FILES.values() if part.startswith(begin)), None)


def main_files(parts: Mapping[str, str]) -> dict[str, str]:
    """The file that the spec names for the model and for the loss, by the part that holds the source."""
    found = {}
    for source, begin in FILES.items():
        scheme, _, rest = parts.get(source, "").partition(":")
        name = {"exported": rest, "python": rest.rpartition(":")[0]}.get(scheme, "")
        if begin + name in parts:
            found[source] = name
    return found


def with_main_files(parts: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    """The parts as they would be if these files had other names; a part stays if another file has that name."""
    found = dict(parts)
    for source, before in main_files(parts).items():
        begin = FILES[source]
        name = names.get(source, before)
        if begin + name in parts:
            continue
        scheme, _, rest = found[source].partition(":")
        found[source] = f"{scheme}:{name}{rest.removeprefix(before)}"
        found[begin + name] = found.pop(begin + before)
    return found


def unnamed(parts: Mapping[str, str]) -> dict[str, str]:
    """The parts as they would be if these files had no names."""
    return with_main_files(parts, dict.fromkeys(FILES, ""))
