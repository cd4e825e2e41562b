"""The measures of a training for TensorBoard, which is an extra."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nimble_jobs.errors import JobFailed


def check() -> None:
    """Raises JobFailed where TensorBoard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise JobFailed("train.tensorboard: not installed; expected: pip install 'nimble-jobs[tensorboard]'")


class Board:
    """Writes scalars to an event file in a folder."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(folder))
        self._folder = folder

    def add(self, prefix: str, step: int, line: Mapping[str, Any]) -> None:
        """Write the numbers of one line of metrics."""
        for name, value in line.items():
            if name not in ("step", "epoch", "kind") and isinstance(value, float):
                self._writer.add_scalar(f"{prefix}/{name}", value, step)

    def close(self) -> list[str]:
        """The names of the files written."""
        self._writer.close()
        return sorted(p.name for p in self._folder.glob("events.out.tfevents.*"))
