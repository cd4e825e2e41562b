"""Reads texts: columns of Parquet and CSV, fields of JSON lines, and plain lines."""

from nimble_jobs.data.text.opening import open_texts
from nimble_jobs.data.text.reading import Texts, read_texts

__all__ = ["Texts", "open_texts", "read_texts"]
