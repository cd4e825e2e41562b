"""A job spec as frozen values. Reading YAML into them, with line numbers, is `load.py`; what contradicts what is `rules.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Device = str  # auto | cpu | cuda | cuda:N


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelSpec(_Frozen):
    source: str  # torchvision:NAME, timm:NAME, transformers:DIR, python:FILE.py:FACTORY, exported:FILE.pt2; paths absolute once loaded
    args: dict[str, Any] = Field(default_factory=dict)
    weights: str | None = None  # absolute path, or the name of a torchvision weights entry
    seed: int = 0
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"


class FieldsSpec(_Frozen):
    x: str = "x"  # array or column that holds the records
    id: str | None = None
    label: str | None = None


class TransformSpec(_Frozen):
    resize: tuple[int, int] | None = None  # height, width; one number in YAML means both
    center_crop: tuple[int, int] | None = None
    channels: Literal[1, 3] | None = None
    scale: float | None = None  # factor on raw values; default 1/255 for 8-bit data, else 1
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    layout: Literal["chw", "hwc"] | None = None  # of stored arrays; default: guessed from the shape, and said


class InputSpec(_Frozen):
    source: str  # absolute file, folder or glob
    format: Literal["images", "npy", "npz", "parquet", "csv"]
    fields: FieldsSpec = FieldsSpec()
    batch_size: int = 32
    transform: TransformSpec = TransformSpec()
    allow_nan: bool = False


class ScheduleSpec(_Frozen):
    on_miss: Literal["build", "eager", "fail"] = "build"
    streams: Literal["auto"] | int = "auto"
    fuse: Literal["auto", "off", "max"] = "auto"
    in_flight: Literal["auto"] | int = "auto"
    tolerance: float | None = None  # default for each dtype: engine.verify.TOLERANCE


class OutputSpec(_Frozen):
    path: Path
    format: Literal["parquet", "jsonl", "npy"] = "parquet"
    fields: tuple[str, ...] = ("id", "top1", "probability")
    if_exists: Literal["fail", "resume", "replace"] = "fail"
    shard_size: int = 1024  # records published together


class RetrySpec(_Frozen):
    max_attempts: int = 3
    backoff: Literal["exponential", "constant"] = "exponential"
    initial: float = 5.0  # seconds
    max: float = 600.0  # seconds


class RunSpec(_Frozen):
    device: Device = "auto"
    priority: int = 0
    after: tuple[str, ...] = ()
    key: str | None = None
    timeout: float | None = None  # seconds
    error_threshold: float = 0.0  # share of records; -1 tolerates all
    retry: RetrySpec = RetrySpec()


class OptimizerSpec(_Frozen):
    name: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: float = 0.01
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0


class LrScheduleSpec(_Frozen):
    name: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: int = 0


class ValidationSpec(_Frozen):
    source: str
    every_epochs: int = 1


class TrainSpec(_Frozen):
    epochs: int = 1
    loss: Literal["cross_entropy"] = "cross_entropy"
    optimizer: OptimizerSpec = OptimizerSpec()
    lr_schedule: LrScheduleSpec = LrScheduleSpec()
    init_from: str | None = None  # weights to start from, absolute path
    validation: ValidationSpec | None = None


class JobSpec(_Frozen):
    version: Literal[1]
    name: str
    kind: Literal["score", "finetune"]
    model: ModelSpec
    input: InputSpec
    schedule: ScheduleSpec = ScheduleSpec()
    output: OutputSpec
    run: RunSpec = RunSpec()
    train: TrainSpec | None = None  # finetune only
