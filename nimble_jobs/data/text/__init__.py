"""Reads texts: columns of Parquet and CSV, fields of JSON lines, and plain lines."""
