"""What a scoring job asks of the planner."""

from __future__ import annotations

from pathlib import Path

import torch

from nimble_jobs.data import Reader
from nimble_jobs.engine import device as devices
from nimble_jobs.planner import Request
from nimble_jobs.spec import JobSpec
from nimble_jobs.workloads.pooling import pooling_of
from nimble_jobs.workloads.text.setup import ColumnOfText


def request_of(
    spec: JobSpec,
    reader: Reader,
    device: torch.device,
    allowed_python: tuple[Path, ...] = (),
    memory_bytes: int | None = None,
    *,
    column: ColumnOfText | None = None,
) -> Request:
    """What the job asks of the planner; if its records are texts, all but the model's padding and a batch's shape.

    `column` is what the reader makes tokens with, if a text is one of several inputs.
    """
    pooling = pooling_of(spec)
    return Request(
        model=spec.model if column is None or column.setup is None else column.setup.model(spec.model),
        shape=reader.signature.shape,
        dtype=reader.signature.dtype,
        batch_size=spec.input.batch_size,
        packing=reader.packing,
        preprocess=reader.preprocess if devices.separate_memory(device) else None,
        schedule=spec.schedule,
        embedding="embedding" in spec.output.fields and pooling is None,
        pooling=pooling,
        allowed_python=allowed_python,
        memory_bytes=memory_bytes,
    )
