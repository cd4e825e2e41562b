"""As eager_sorted.py, with `torch.compile(dynamic=True)`: one program for all lengths."""

import torch

from nimble_jobs.bench.text.loops import eager_sorted
from nimble_jobs.bench.text.loops.task import Task


def embed(task: Task) -> None:
    eager_sorted.embed(task, wrapped=lambda model: torch.compile(model, dynamic=True, mode=task.mode))
