"""A job spec as frozen values, and what each field may hold by itself.

Reading YAML into them, with line numbers, is `load.py`; what contradicts what is `rules.py`. Validators raise
`BadValue`, which says what was found and what was expected. Relative paths become absolute where the validation
context holds `base`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
)

from nimble_jobs.spec import paths
from nimble_jobs.spec.units import DEVICE_PATTERN, DURATION_PATTERN, BadValue, parse_device, parse_duration, show


def _based(make: Callable[[str, Path | None], str]) -> AfterValidator:
    def validate(value: str, info: ValidationInfo) -> str:
        return make(value, (info.context or {}).get("base"))

    return AfterValidator(validate)


def _matching(pattern: str, expected: str) -> tuple[AfterValidator, WithJsonSchema]:
    compiled = re.compile(pattern)

    def validate(value: str) -> str:
        if not compiled.fullmatch(value):
            raise BadValue(f"found {show(value)}", expected)
        return value

    return AfterValidator(validate), WithJsonSchema({"type": "string", "pattern": f"^(?:{pattern})$"})


def _version(value: object) -> object:
    if type(value) is not int or value != 1:  # true and 1.0 equal 1 in Python
        raise BadValue(f"found {show(value)}", "1")
    return value


def _pair(value: object) -> object:
    sizes = value if isinstance(value, list | tuple) else [value, value]
    if len(sizes) != 2 or not all(type(n) is int and 1 <= n <= 65_536 for n in sizes):
        raise BadValue(f"found {show(value)}", "a size in pixels, or [height, width]")
    return tuple(sizes)


def _auto_or_count(value: object) -> object:
    if value == "auto" or (type(value) is int and 1 <= value <= 1024):
        return value
    raise BadValue(f"found {show(value)}", "auto or a whole number from 1 to 1024")


def _resume(text: str, base: Path | None) -> str:
    return text if text in ("auto", "never") else paths.absolute(text, base)


def _share(value: float) -> float:
    if value == -1 or 0 <= value <= 1:
        return value
    raise BadValue(f"found {show(value)}", "a share from 0 to 1, or -1 to tolerate all")


def _output_path(value: object, info: ValidationInfo) -> object:
    if isinstance(value, str):
        return Path(paths.absolute(value, (info.context or {}).get("base")))
    if isinstance(value, Path):
        return value
    raise BadValue(f"found {show(value)}", "a folder")


def _key(value: str) -> str:
    if not value.strip() or not value.isprintable() or len(value) > 200:
        raise BadValue(f"found {show(value)}", "a text of 1 to 200 printable characters")
    return value


NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
NAME_EXPECTED = "1 to 100 letters, digits, dots, dashes and underscores, the first a letter or digit"
KNOWN_OUTPUTS = ("id", "label", "top1", "top5", "probability", "logits", "embedding")

_NameCheck, _NameSchema = _matching(NAME, NAME_EXPECTED)
_FieldCheck, _FieldSchema = _matching(
    r"[A-Za-z_][A-Za-z0-9_]*", f"{', '.join(KNOWN_OUTPUTS)}, or the name of one of the model's outputs"
)
_Whole = Annotated[int, Field(ge=1)]
_Number = Annotated[float, Field(allow_inf_nan=False)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

Name = Annotated[str, _NameCheck, _NameSchema]
Device = Annotated[
    str, AfterValidator(parse_device), WithJsonSchema({"type": "string", "pattern": f"^(?:{DEVICE_PATTERN})$"})
]
OutputField = Annotated[str, _FieldCheck, _FieldSchema]
Seconds = Annotated[
    float,
    BeforeValidator(parse_duration),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "pattern": DURATION_PATTERN}]}),
]
HeightWidth = Annotated[
    tuple[int, int],
    BeforeValidator(_pair),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1},
                {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 2, "maxItems": 2},
            ]
        }
    ),
]
AutoOrCount = Annotated[
    Literal["auto"] | int,
    PlainValidator(_auto_or_count),
    WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1, "maximum": 1024}]}),
]
WeightsFile = Annotated[str, _based(paths.weights_file)]
DataPath = Annotated[str, _based(paths.absolute_glob)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelSpec(_Frozen):
    """The module to run, and its weights."""

    source: Annotated[str, _based(lambda text, base: str(paths.parse_source(text, base)))] = Field(
        description=f"Source of the module: {paths.SOURCE_EXPECTED}.", examples=["torchvision:resnet18"]
    )
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments for the model's constructor.")
    weights: Annotated[str, _based(paths.weights)] | None = Field(
        default=None,
        description="A .safetensors, .pt or .pth file, or a torchvision weights name; absent: random, from seed.",
    )
    seed: int = Field(default=0, ge=0, description="Seed of random weights and of the order of training records.")
    dtype: Literal["fp32", "fp16", "bf16"] = Field(default="fp32", description="Type of the weights and computation.")


class FieldsSpec(_Frozen):
    """Which array or column holds what."""

    x: str = Field(default="x", min_length=1, description="Array or column that holds the records.")
    id: str | None = Field(default=None, min_length=1, description="Array or column of record ids; absent: positions.")
    label: str | None = Field(default=None, min_length=1, description="Array or column of class labels.")


class TransformSpec(_Frozen):
    """What happens to each record before the model sees it."""

    resize: HeightWidth | None = Field(default=None, description="Size in pixels: one number, or [height, width].")
    center_crop: HeightWidth | None = Field(default=None, description="Size kept around the centre, after resizing.")
    channels: Literal[1, 3] | None = Field(default=None, description="Channels the model wants; grey is repeated.")
    scale: _Positive | None = Field(
        default=None, description="Factor on raw values; by default 1/255 for 8-bit data, otherwise 1."
    )
    mean: tuple[_Number, ...] | None = Field(default=None, min_length=1, description="Subtracted, for each channel.")
    std: tuple[_Positive, ...] | None = Field(default=None, min_length=1, description="Divided by, for each channel.")
    layout: Literal["chw", "hwc"] | None = Field(
        default=None, description="Order of the dimensions of stored arrays; by default guessed from the shape."
    )


class InputSpec(_Frozen):
    """The records."""

    source: DataPath = Field(description="A file, a folder or a glob.", examples=["digits.npz"])
    format: Literal["images", "npy", "npz", "parquet", "csv"] = Field(
        description="Format of the records: images, npy, npz, parquet or csv.", examples=["npz"]
    )
    fields: FieldsSpec = Field(default=FieldsSpec(), description="Which array or column holds what.")
    batch_size: int = Field(default=32, ge=1, le=65_536, description="Records in one call of the model.")
    transform: TransformSpec = Field(default=TransformSpec(), description="What happens to each record first.")
    allow_nan: bool = Field(default=False, description="Accept records that hold NaN.")


class ScheduleSpec(_Frozen):
    """How the model's schedule is found, built and checked."""

    on_miss: Literal["build", "eager", "fail"] = Field(
        default="build", description="What to do without a stored schedule: build one, run in eager, or fail."
    )
    streams: AutoOrCount = Field(default="auto", description="Streams of the schedule.")
    fuse: Literal["auto", "off", "max"] = Field(default="auto", description="How hard to fuse kernels.")
    in_flight: AutoOrCount = Field(default="auto", description="Replays in flight at once.")
    tolerance: _Positive | None = Field(
        default=None, le=1, description="Largest relative norm of the difference from eager; by default set by dtype."
    )


class OutputSpec(_Frozen):
    """Where results go. The folder appears whole or not at all."""

    path: Annotated[Path, PlainValidator(_output_path), WithJsonSchema({"type": "string", "minLength": 1})] = Field(
        description="The folder to publish.", examples=["../out/digits-score"]
    )
    format: Literal["parquet", "jsonl", "npy"] = Field(default="parquet", description="How results are stored.")
    fields: tuple[OutputField, ...] = Field(
        default=("id", "top1", "probability"),
        min_length=1,
        description=f"Columns: {', '.join(KNOWN_OUTPUTS)}, or names of the model's outputs.",
    )
    if_exists: Literal["fail", "resume", "replace"] = Field(
        default="fail", description="What to do where the folder exists already."
    )
    shard_size: int = Field(default=1024, ge=1, le=2**31, description="Records published together.")


class RetrySpec(_Frozen):
    """When a job is tried again after a lost worker, a device fault or too little memory."""

    max_attempts: int = Field(default=3, ge=1, le=100, description="Attempts in all.")
    backoff: Literal["exponential", "constant"] = Field(default="exponential", description="How the wait grows.")
    initial: Seconds = Field(default=5.0, description="Wait before the second attempt.")
    max: Seconds = Field(default=600.0, description="Longest wait.")


class RunSpec(_Frozen):
    """Where, when and how patiently the job runs."""

    device: Device = Field(default="auto", description="auto, cpu, cuda or cuda:N.")
    priority: int = Field(default=0, ge=-(2**31), lt=2**31, description="Higher runs first.")
    after: tuple[Name, ...] = Field(default=(), description="Ids or names of jobs that must succeed first.")
    key: Annotated[str, AfterValidator(_key)] | None = Field(
        default=None, description="Idempotency key: the same key and spec give the job that exists."
    )
    timeout: Seconds | None = Field(default=None, description="Longest time that one attempt may take.")
    error_threshold: Annotated[float, AfterValidator(_share)] = Field(
        default=0.0, description="Share of bad records tolerated; -1 tolerates all."
    )
    retry: RetrySpec = Field(default=RetrySpec(), description="When to try again.")


class CronSpec(_Frozen):
    """A timer that submits the job."""

    expression: str = Field(min_length=1, description="Five fields, as in crontab.", examples=["15 2 * * *"])
    timezone: str = Field(default="UTC", min_length=1, description="Name of the time zone.")
    overlap: str = Field(default="skip", min_length=1, description="What to do while the last job still runs.")
    grace: Seconds = Field(default=600.0, description="How late a missed time is still honoured.")


class OptimizerSpec(_Frozen):
    """How the weights are moved."""

    name: Literal["sgd", "adam", "adamw"] = Field(default="sgd", description="The optimizer.")
    lr: _Positive = Field(default=0.01, description="Learning rate.")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="Momentum, for sgd.")
    nesterov: bool = Field(default=False, description="Nesterov momentum, for sgd.")
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False, description="Weight decay.")


class LrScheduleSpec(_Frozen):
    """How the learning rate changes."""

    name: Literal["constant", "cosine", "linear"] = Field(
        default="constant", description="Its shape after the warm-up."
    )
    warmup_steps: int = Field(default=0, ge=0, description="Steps over which the rate rises from zero.")


class ValidationSpec(_Frozen):
    """Held-out records, of the same format as the input."""

    source: DataPath = Field(description="A file, a folder or a glob.", examples=["digits-val.npz"])
    every_epochs: int = Field(default=1, ge=1, description="Epochs between two validations.")


class CheckpointSpec(_Frozen):
    """What is kept of an unfinished training."""

    every_steps: _Whole | None = Field(default=None, description="Steps between two checkpoints.")
    keep_last: int = Field(default=2, ge=1, description="How many checkpoints are kept.")
    best: str | None = Field(default=None, min_length=1, description="The measure whose best checkpoint is kept.")


class TrainSpec(_Frozen):
    """The fine-tuning."""

    epochs: int = Field(default=1, ge=1, le=1_000_000, description="Passes over the input.")
    loss: Literal["cross_entropy"] = Field(default="cross_entropy", description="The loss.")
    optimizer: OptimizerSpec = Field(default=OptimizerSpec(), description="How the weights are moved.")
    lr_schedule: LrScheduleSpec = Field(default=LrScheduleSpec(), description="How the learning rate changes.")
    init_from: WeightsFile | None = Field(default=None, description="Weights file that a new training starts from.")
    resume: Annotated[str, _based(_resume)] = Field(
        default="never", min_length=1, description="Which unfinished training goes on: auto, never, or a path."
    )
    checkpoint: CheckpointSpec | None = Field(default=None, description="What is kept of an unfinished training.")
    validation: ValidationSpec | None = Field(default=None, description="Held-out records.")


class JobSpec(_Frozen):
    """One job of nimble-jobs."""

    version: Annotated[Literal[1], BeforeValidator(_version)] = Field(
        description="The version of this format, 1.", examples=[1]
    )
    name: Name = Field(description=f"The job's name: {NAME_EXPECTED}.", examples=["digits-score"])
    kind: Literal["score", "finetune"] = Field(description="Kind of job: score or finetune.", examples=["score"])
    model: ModelSpec = Field(description="The module to run, and its weights.")
    input: InputSpec = Field(description="The records.")
    schedule: ScheduleSpec = Field(default=ScheduleSpec(), description="How the model's schedule is found and built.")
    output: OutputSpec = Field(description="Where results go.")
    run: RunSpec = Field(default=RunSpec(), description="Where, when and how patiently the job runs.")
    cron: CronSpec | None = Field(default=None, description="A timer that submits the job.")
    train: TrainSpec | None = Field(default=None, description="The fine-tuning; for kind: finetune only.")
