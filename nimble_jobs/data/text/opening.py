"""Opens the files of an input of texts, each by its suffix."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from nimble_jobs.data.ids import Numbered
from nimble_jobs.data.joined import Joined, open_all
from nimble_jobs.data.listed import open_listed
from nimble_jobs.data.source import Source, list_files
from nimble_jobs.data.text.lines import open_json_lines, open_plain_lines
from nimble_jobs.data.text.tables import open_csv_texts, open_parquet_texts
from nimble_jobs.data.text.values import TextSource
from nimble_jobs.errors import DataError
from nimble_jobs.seen import FileList
from nimble_jobs.spec.formats import SUFFIXES
from nimble_jobs.spec.model import InputSpec

_LINES = {".jsonl": open_json_lines, ".ndjson": open_json_lines, ".txt": open_plain_lines}
_OPENERS = {".parquet": open_parquet_texts, ".pq": open_parquet_texts, ".csv": open_csv_texts, **_LINES}


def open_texts(spec: InputSpec, files: FileList | None = None) -> Source:
    """The records of all files. Raises DataError.

    Records of one .txt file are named by their lines, from 1, and those of several as FILE:LINE; with the folders that
    are not common to all if two have the same name.
    """
    if files is not None:
        return open_listed(files, lambda path: _open(spec, path))
    paths = list_files(spec.source, SUFFIXES["text"])
    found, empty = open_all(paths, lambda path: _open(spec, path))
    if all(map(_of_lines, paths)):
        for part, name in zip(found.values(), _names(list(found), several=len(paths) > 1), strict=True):
            part.ids = Numbered(name, part.total, first=1)
    parts = list(found.values())
    return parts[0] if len(paths) == 1 else Joined(parts, empty=empty)


def _names(paths: Sequence[Path], *, several: bool) -> list[str]:
    """What the records of each file are named by."""
    names = [path.name if several else "" for path in paths]
    if len(set(names)) == len(names):
        return names
    root = os.path.commonpath([path.parent for path in paths])
    return [path.relative_to(root).as_posix() for path in paths]


def _open(spec: InputSpec, path: Path) -> TextSource:
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    packed = suffixes[-1:] == [".gz"]
    suffix = suffixes[-2] if packed and len(suffixes) > 1 else suffixes[-1] if suffixes else ""
    open_one = (_LINES if packed else _OPENERS).get(suffix)
    if open_one is None:
        raise DataError(
            f"{path}: unknown kind of text; expected {_listed(SUFFIXES['text'][:-1])}, or .jsonl.gz, .txt.gz"
        )
    return open_one(spec, path)


def _of_lines(path: Path) -> bool:
    return path.name.lower().removesuffix(".gz").endswith(".txt")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)
