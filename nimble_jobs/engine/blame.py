"""Refuses what cannot be recorded, and names the model's line that is to blame."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import torch

from nimble_jobs.errors import CannotRecord

_TORCH_FOLDER = f"{Path(torch.__file__).parent}/"
_PYTHON_FOLDER = f"{Path(os.__file__).parent}/"
_OWN_FILES = (
    *(str(Path(__file__).with_name(f"{n}.py")) for n in ("blame", "memory", "recorder", "host_reads", "rewrites")),
    f"{Path(__file__).with_name('private')}/",
)


class Blame:
    """Which submodules are being called, and the first refusal."""

    def __init__(self) -> None:
        self.path: list[str] = []  # names of the submodules being called, outermost first
        self.layout_question: str | None = None  # the first one, about a tensor that varies, and where it was asked
        self._refusal: CannotRecord | None = None

    def refuse(self, message: str) -> NoReturn:
        """Raise CannotRecord. {source} in the message becomes the line that is to blame."""
        refusal = CannotRecord(message.replace("{source}", self._source()))
        self._refusal = self._refusal or refusal
        raise refusal

    def raise_again(self) -> None:
        """Raise the first refusal again. The model may have caught it and taken another path than in eager."""
        if self._refusal is not None:
            raise self._refusal

    def note_layout_question(self, name: str) -> None:
        """Note that the model asks how a tensor lies in memory."""
        self.layout_question = self.layout_question or f"{name} at {self._source()}"

    def _source(self) -> str:
        """The innermost submodule, and the nearest line outside torch and Python's standard library."""
        frame = sys._getframe(1)
        while frame.f_back is not None:
            file = frame.f_code.co_filename
            library = file.startswith(_PYTHON_FOLDER) and "site-packages" not in file
            library = library or file.startswith((_TORCH_FOLDER, "<", *_OWN_FILES))
            if not library:
                break
            frame = frame.f_back
        line = f"{'/'.join(Path(frame.f_code.co_filename).parts[-2:])}:{frame.f_lineno}"
        return f"{self.path[-1]} ({line})" if self.path and self.path[-1] else line
