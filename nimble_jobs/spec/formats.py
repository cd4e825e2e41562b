"""The formats of inputs and outputs: their names, the suffixes of their files, and what they can hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

InputFormat = Literal["images", "npy", "npz", "parquet", "csv", "text", "openai-batch"]
INPUTS: tuple[InputFormat, ...] = get_args(InputFormat)
SUFFIXES: dict[InputFormat, tuple[str, ...]] = {  # of the files of each format
    "npy": (".npy",),
    "npz": (".npz",),
    "parquet": (".parquet", ".pq"),
    "csv": (".csv",),
    "images": (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"),
    "text": (".parquet", ".pq", ".csv", ".jsonl", ".ndjson", ".txt", ".gz"),  # .gz of jsonl and txt
    "openai-batch": (".jsonl", ".ndjson", ".gz"),
}
COLUMNS: tuple[InputFormat, ...] = ("npz", "parquet", "csv")  # several named arrays or columns
PICTURES: frozenset[InputFormat] = frozenset({"images", "parquet"})  # may hold encoded pictures
TEXTS: frozenset[InputFormat] = frozenset({"text", "openai-batch"})

OutputFormat = Literal["parquet", "jsonl", "npy", "openai-batch"]
# Those that hold the results of any input, and those among them that hold lists of different lengths.
RECORDS: tuple[OutputFormat, ...] = tuple(name for name in get_args(OutputFormat) if name != "openai-batch")
LISTS: tuple[OutputFormat, ...] = ("parquet", "jsonl")


def either(names: Iterable[str]) -> str:
    """`npz, parquet or csv`, for messages."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
