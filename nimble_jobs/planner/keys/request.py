"""What a job asks for, and the key under which its schedule is kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nimble_jobs.argument_paths import PART
from nimble_jobs.engine import device as devices
from nimble_jobs.engine import verify
from nimble_jobs.models import identity, weights_identity
from nimble_jobs.models.preprocessed import crossing_dtype
from nimble_jobs.packing import Layout, layout_of_words
from nimble_jobs.planner.keys.files import unnamed
from nimble_jobs.planner.keys.options import option_parts, options_of
from nimble_jobs.preprocess import Preprocess
from nimble_jobs.schedule import FORMAT_VERSION
from nimble_jobs.sentence import Pooling
from nimble_jobs.spec import ModelSpec, ScheduleSpec

_FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Request:
    """A model and the batches that it will be given."""

    model: ModelSpec
    shape: tuple[int, ...]  # of one record
    dtype: str  # of one record as the host makes it ready: a floating type or an integer type
    batch_size: int
    preprocess: Preprocess | None = None  # what the device does to records before the model; None: nothing
    packing: Layout | None = None  # of rows of bytes, uint8 [nbytes], that hold several inputs; None: there is one
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    embedding: bool = False  # also return the features under the last linear layer
    pooling: Pooling | None = None  # also return one vector for each text, made from its tokens' vectors
    memory_bytes: int | None = None  # the user's limit for all schedules on the device together; None: no limit
    allowed_python: tuple[Path, ...] = ()
    batches: float | None = None  # full batches that the job expects; None: unknown. Not part of the key

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of a batch as it crosses to the device."""
        return (self.batch_size, *(self.shape if self.preprocess is None else self.preprocess.shape))

    @property
    def input_dtype(self) -> torch.dtype:
        """The dtype of a batch as it crosses to the device.

        Without `preprocess`, floating records take the model's dtype, and others are int64.
        """
        if self.packing is not None:
            return torch.uint8
        return self.model_dtype if self.preprocess is None else crossing_dtype(self.preprocess)

    @property
    def model_dtype(self) -> torch.dtype:
        """The dtype of what the model itself is given; with several inputs, of its floating ones."""
        return torch.int64 if self.all_integers else _FLOATS[self.model.dtype]

    @property
    def all_integers(self) -> bool:
        """Whether the model's only input is of an integer type."""
        return self.packing is None and not self.dtype.startswith("float")

    @property
    def holds_integers(self) -> bool:
        """Whether the model is given integers, which may be out of the range of a table."""
        return self.all_integers if self.packing is None else self.packing.holds_integers

    def to_json(self) -> dict[str, Any]:
        """What another process needs to ask for the same schedule, as JSON-able values."""
        return {
            "model": self.model.model_dump(mode="json"),
            "shape": list(self.shape),
            "dtype": self.dtype,
            "batch_size": self.batch_size,
            "preprocess": None if self.preprocess is None else self.preprocess.to_json(),
            "packing": None if self.packing is None else self.packing.words,
            "schedule": self.schedule.model_dump(mode="json"),
            "embedding": self.embedding,
            "pooling": None if self.pooling is None else self.pooling.words,
            "memory_bytes": self.memory_bytes,
            "allowed_python": [str(folder) for folder in self.allowed_python],
        }

    @classmethod
    def of_json(cls, given: Mapping[str, Any]) -> Request:
        """Inverse of `to_json`, without `batches`. Other keys of `given` are ignored."""
        return cls(
            model=ModelSpec.model_validate(given["model"]),
            shape=tuple(given["shape"]),
            dtype=given["dtype"],
            batch_size=given["batch_size"],
            preprocess=None if given["preprocess"] is None else Preprocess.of_json(given["preprocess"]),
            packing=None if given["packing"] is None else layout_of_words(given["packing"]),
            schedule=ScheduleSpec.model_validate(given["schedule"]),
            embedding=given["embedding"],
            pooling=None if given["pooling"] is None else Pooling.of_words(given["pooling"]),
            memory_bytes=given["memory_bytes"],
            allowed_python=tuple(Path(folder) for folder in given["allowed_python"]),
        )


def key_parts(request: Request, device: torch.device, facts: Mapping[str, str] | None = None) -> dict[str, str]:
    """Everything that a schedule depends on, readable. Builds, traces and moves nothing; weights are not in it.

    `facts` are those of the device, if they were noted before code of the model ran, which may change some.
    """
    steps, packing = request.preprocess, request.packing
    size = list(request.input_shape)
    kind = str(request.input_dtype).removeprefix("torch.") if steps is None else steps.dtype
    return {
        **identity(request.model),
        **(devices.facts(device) if facts is None else facts),
        "format": str(FORMAT_VERSION),
        "mode": "inference",
        "input": f"x:{kind}{size}" if packing is None else f"[{request.batch_size}] {packing.text}",
        **({} if steps is None else {"input.preprocess": steps.words}),
        **({} if packing is None else {PART + path: said for path, said in packing.words.items()}),
        "input.memory_format": "contiguous",  # what batches are copied into; the program lays it out as it likes
        "outputs": "model and embedding" if request.embedding else "model",
        **({} if request.pooling is None else {"outputs.pooling": request.pooling.words}),
        "tolerance": repr(tolerance_of(request)),  # a schedule that fails one tolerance may pass another
        **option_parts(options_of(request.schedule)),
        "schedule.in_flight": str(request.schedule.in_flight),
        "schedule.memory_bytes": "any" if request.memory_bytes is None else str(request.memory_bytes),
    }


def tolerance_of(request: Request) -> float:
    """What the spec asks for, else the default of the model's dtype."""
    asked = request.schedule.tolerance
    return asked if asked is not None else verify.TOLERANCE[request.model.dtype]


def schedule_key(parts: Mapping[str, str]) -> str:
    """SHA-256, in hex, of the canonical JSON of the parts. File names of the model and of the loss are left out."""
    return hashlib.sha256(json.dumps(unnamed(parts), sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def resident_key(key: str, request: Request) -> str:
    """The key of a model that stays on the device: its weights count too."""
    return f"{key}:{weights_identity(request.model)}"
