"""Opens the files of an input of texts, each by its suffix."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nimble_jobs.data.ids import Numbered
from nimble_jobs.data.listed import open_listed
from nimble_jobs.data.source import Joined, Source, list_files
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

    Records of one .txt file are named by their lines, from 1, and those of several as FILE:LINE.
    """
    if files is not None:
        return open_listed(files, lambda path: _open(spec, path))
    paths = list_files(spec.source, SUFFIXES["text"])
    parts = [_open(spec, path) for path in paths]
    if all(map(_of_lines, paths)):
        for path, part in zip(paths, parts, strict=True):
            part.ids = Numbered(path.name if len(parts) > 1 else "", part.total, first=1)
    return parts[0] if len(parts) == 1 else Joined(parts)


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
