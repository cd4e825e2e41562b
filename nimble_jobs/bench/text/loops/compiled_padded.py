"""As eager_sorted.py, but every batch is padded to `max_length`, so that one CUDA graph of one shape serves all."""

import torch

from nimble_jobs.bench.text.loops import eager_sorted
from nimble_jobs.bench.text.loops.task import Task


def embed(task: Task) -> None:
    compiled = lambda model: torch.compile(model, dynamic=False, mode="reduce-overhead")  # noqa: E731
    eager_sorted.embed(task, wrapped=compiled, pad_to=task.max_length)
