"""Writes the configuration of a state folder."""

from __future__ import annotations

from pathlib import Path


def configure(home: Path, text: str) -> Path:
    """`text` as config.yaml, in the place of an earlier one; its path."""
    path = home / "config.yaml"
    new = home / ".config.yaml"
    new.write_text(text)
    new.chmod(0o600)
    new.replace(path)
    return path
