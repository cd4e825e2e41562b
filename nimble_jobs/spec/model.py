"""A job spec as frozen values, and what each field may hold by itself. `training.py` has what is in `train`.

`load.py` reads YAML into them, with line numbers; `rules.py` checks for contradictions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, ValidationInfo, WithJsonSchema

from nimble_jobs.spec import paths
from nimble_jobs.spec.fields import (
    NAME_EXPECTED,
    AfterItem,
    AllOrCount,
    AutoOrCount,
    AutoOrFlag,
    Columns,
    Device,
    Frozen,
    LimitOrOff,
    Name,
    OutputField,
    Positive,
    Seconds,
    based,
    or_defaults,
)
from nimble_jobs.spec.formats import INPUTS, InputFormat, OutputFormat, either
from nimble_jobs.spec.input_source import input_source
from nimble_jobs.spec.kernel_fields import KernelsSpec
from nimble_jobs.spec.notify import NotifySpec
from nimble_jobs.spec.output_path import output_path
from nimble_jobs.spec.text import TextSpec
from nimble_jobs.spec.timer_fields import TEMPLATED, ExpressionText, MomentText, ZoneName
from nimble_jobs.spec.training import TrainSpec
from nimble_jobs.spec.transform import TransformSpec
from nimble_jobs.spec.units import BadValue, wrong


def _version(value: object) -> object:
    if type(value) is not int or value != 1:  # in Python, true and 1.0 equal 1
        raise BadValue(wrong(value), "1")
    return value


def _share(value: float) -> float:
    if value == -1 or 0 <= value <= 1:
        return value
    raise BadValue(wrong(value), "a fraction from 0 to 1, or -1 to tolerate all")


def _key(value: str) -> str:
    if not value.strip() or not value.isprintable() or len(value) > 200:
        raise BadValue(wrong(value), "text of 1 to 200 printable characters")
    return value


class ModelSpec(Frozen):
    """The module to run, and its weights."""

    source: Annotated[str, based(lambda text, base: str(paths.parse_source(text, base)))] = Field(
        description=f"The source of the module: {paths.SOURCE_EXPECTED}.", examples=["torchvision:resnet18"]
    )
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments for the model's constructor.")
    weights: Annotated[str, based(paths.weights)] | None = Field(
        default=None,
        description="A .safetensors, .pt or .pth file, or a torchvision weights name; absent: random, from seed.",
    )
    seed: int = Field(default=0, ge=0, description="Seed of random weights and of the order of training records.")
    dtype: Literal["fp32", "fp16", "bf16"] = Field(
        default="fp32", description="Type of the weights and computation; fine-tuning keeps its weights in fp32."
    )


class FieldsSpec(Frozen):
    """Names of the arrays or columns to read."""

    x: Columns = Field(
        default="x",
        description="What the model gets: an array or column, columns to join (a,b,c*), a mapping from its arguments "
        "to these, or two columns of text.",
        examples=["images", "c*", {"image": "pixels", "meta.age": "age"}, ["question", "passage"]],
    )
    id: str | None = Field(default=None, min_length=1, description="Array or column of record ids; absent: positions.")
    label: str | None = Field(
        default=None, min_length=1, description="Array or column of class labels, or of target numbers."
    )

    @property
    def arguments(self) -> dict[str, str] | None:
        """What each argument of a model with several is read from; None for a model with one input."""
        return self.x if isinstance(self.x, dict) else None

    @property
    def which(self) -> str:
        """The field that names the records, for messages."""
        return "x"

    @property
    def name(self) -> str:
        """`x` of a model with one input."""
        assert isinstance(self.x, str)
        return self.x

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of texts: one, or two that make a pair."""
        return (self.x,) if isinstance(self.x, str) else tuple(self.x)


class OnlyNewSpec(Frozen):
    """Score only the files that no earlier successful run of this name has scored."""

    settle: Seconds = Field(default=60.0, description="A file that changed more recently waits for the next run.")
    changed: Literal["rescore", "ignore", "fail"] = Field(
        default="rescore", description="What to do with a file whose size or time changed since it was scored."
    )
    model_change: Literal["new", "all"] = Field(
        default="new", description="Which files a changed model scores: only new ones, or all of them again."
    )


class InputSpec(Frozen):
    """The records."""

    source: Annotated[str, TEMPLATED, based(input_source)] = Field(
        description="A file, a folder or a glob, here or at an address such as s3://BUCKET/FOLDER; with cron, "
        "templates such as {{ tick:%Y-%m-%d }}.",
        examples=["digits.npz"],
    )
    format: InputFormat = Field(description=f"The format of the records: {either(INPUTS)}.", examples=["npz"])
    fields: FieldsSpec = Field(default=FieldsSpec(), description="Names of the arrays or columns to read.")
    batch_size: int = Field(default=32, ge=1, le=65_536, description="Records in one call of the model.")
    transform: TransformSpec = Field(default=TransformSpec(), description="How each record is prepared for the model.")
    decode: Literal["auto", "cpu", "gpu"] = Field(
        default="auto",
        description="What decodes pictures: the CPU, or a CUDA device with a decoder; auto: the device if possible.",
    )
    allow_nan: bool = Field(default=False, description="Accept records that hold NaN.")
    text: TextSpec | None = Field(default=None, description="How texts become tokens, if records are or hold text.")
    only_new: Annotated[
        OnlyNewSpec | None,
        BeforeValidator(or_defaults, json_schema_input_type=OnlyNewSpec | bool | None),
    ] = Field(default=None, description="Score only files that no earlier run has scored; true: with the defaults.")


class ScheduleSpec(Frozen):
    """How the model's schedule is found, built and checked."""

    on_miss: Literal["build", "eager", "fail"] = Field(
        default="build", description="What to do without a stored schedule: build one, run in eager, or fail."
    )
    streams: AutoOrCount = Field(default="auto", description="Streams of the schedule.")
    fuse: Literal["auto", "off", "max"] = Field(default="auto", description="How hard to fuse kernels.")
    in_flight: AutoOrCount = Field(default="auto", description="Replays in flight at once.")
    kernels: KernelsSpec = Field(
        default=KernelsSpec(),
        description="Kernels and rewrites of our own, each by its name; NAME: false leaves one out.",
    )
    budget: Seconds | None = Field(
        default=None,
        description="Time limit for building a schedule: after it, no further candidate is tried; by default 15m.",
    )
    progressive: AutoOrFlag = Field(
        default="auto",
        description="Without a stored schedule: auto builds only if it pays; true begins in eager and builds beside "
        "the job; false builds first.",
    )
    tolerance: Positive | None = Field(
        default=None, le=1, description="Largest relative norm of the difference from eager; by default set by dtype."
    )


_OUTPUT_FIELDS = ("id", "top1", "probability")


def _output_fields(value: object, info: ValidationInfo) -> object:
    """Answers of the API have one form, so it is their default."""
    if value is _OUTPUT_FIELDS and info.data.get("format") == "openai-batch":
        return ("id", "embedding")
    return tuple(value) if isinstance(value, list) else value  # JSON has no tuples


class OutputSpec(Frozen):
    """The folder of results. It appears whole or not at all."""

    path: Annotated[Path | str, PlainValidator(output_path), WithJsonSchema({"type": "string", "minLength": 1})] = (
        Field(
            description="The folder to publish, or an address such as s3://BUCKET/FOLDER; with cron, templates such as "
            "{{ tick:%Y-%m-%d }}.",
            examples=["../out/digits-score"],
        )
    )
    format: OutputFormat = Field(
        default="parquet",
        description="How results are stored. openai-batch: as the API's answers, for an input in the same format.",
    )
    fields: Annotated[tuple[OutputField, ...], BeforeValidator(_output_fields)] = Field(
        default=_OUTPUT_FIELDS,
        validate_default=True,
        min_length=1,
        description="Columns, such as id, top1, probability and embedding, or names of the model's outputs.",
    )
    pooling: Literal["mean", "cls", "last", "max"] | None = Field(
        default=None,
        description="How a text's token vectors become its embedding; by default as the model's modules.json says.",
    )
    normalize: bool | None = Field(
        default=None,
        description="Whether to scale embeddings to length 1; by default only if the model's modules.json says so.",
    )
    if_exists: Literal["fail", "resume", "replace"] = Field(
        default="fail", description="What to do if the folder exists already."
    )
    shard_size: int = Field(default=1024, ge=1, le=2**31, description="Records in one file.")

    @property
    def address(self) -> str | None:
        """`path` if it is an address in an object store."""
        return self.path if isinstance(self.path, str) else None

    @property
    def folder(self) -> Path:
        """`path` of an output that is a local folder."""
        assert isinstance(self.path, Path)
        return self.path


class RetrySpec(Frozen):
    """How often and when a job is tried again after a lost worker, a device fault, lack of memory, or a disk error."""

    max_attempts: int = Field(default=3, ge=1, le=100, description="Attempts in all, including the first.")
    backoff: Literal["exponential", "constant"] = Field(
        default="exponential", description="How the wait between attempts grows."
    )
    initial: Seconds = Field(default=5.0, description="Longest wait before the second attempt.")
    max: Seconds = Field(
        default=600.0, description="Longest wait. Each wait is random, from 0 to its longest, so that jobs spread out."
    )


class GroupSpec(Frozen):
    """A group of jobs with a limit on how many run at once."""

    name: Name = Field(description=f"The group's name: {NAME_EXPECTED}.", examples=["gpu"])
    limit: int = Field(
        ge=1,
        le=10_000,
        description="The number of the group's jobs that may run at once; the newest job's value counts.",
        examples=[1],
    )


class RunSpec(Frozen):
    """Where and when the job runs, and how often it is tried."""

    device: Device = Field(default="auto", description="auto, cpu, cuda or cuda:N.")
    gpus: AllOrCount = Field(
        default=1,
        description="How many devices score the job at once, or all that are idle; of a fine-tuning: how many of one "
        "machine train together.",
    )
    max_failed_shards: int = Field(
        default=0,
        ge=0,
        lt=2**31,
        description="With several gpus: how many shards may fail for good without failing the job.",
    )
    priority: int = Field(default=0, ge=-(2**31), lt=2**31, description="Higher runs first.")
    after: tuple[AfterItem, ...] = Field(
        default=(),
        description="Ids or names of jobs that must succeed first, or {job: NAME, when: success | failure | done}.",
    )
    group: GroupSpec | None = Field(default=None, description="A group of jobs with a limit on how many run at once.")
    key: Annotated[str, AfterValidator(_key), TEMPLATED] | None = Field(
        default=None, description="Idempotency key: the same key and spec give the job that exists."
    )
    timeout: Seconds | None = Field(default=None, description="Longest time for one attempt.")
    stall: LimitOrOff | None = Field(
        default=None,
        description="Longest time without progress, after which the attempt's process is ended; off: no limit; null: "
        "limits.stall of the worker.",
    )
    error_threshold: Annotated[float, AfterValidator(_share)] = Field(
        default=0.0, description="Share of bad records tolerated; -1 tolerates all."
    )
    retry: RetrySpec = Field(default=RetrySpec(), description="When to try again.")


class CronSpec(Frozen):
    """A timer that submits the job."""

    expression: ExpressionText = Field(
        description="Five fields, as in crontab, or @hourly, @daily, @weekly, @monthly.", examples=["15 2 * * *"]
    )
    timezone: ZoneName = Field(default="UTC", description="IANA name of the time zone.")
    overlap: Literal["skip", "queue", "allow", "replace"] = Field(
        default="skip",
        description="If the last job has not ended: skip the tick, let one wait, run both, or cancel the last job.",
    )
    catch_up: Literal["latest", "all", "none"] = Field(
        default="latest",
        description="Which ticks to run that were missed while no worker ran: the latest, all, or none.",
    )
    grace: Seconds | None = Field(
        default=None, description="How late a tick may still start; by default until the next one is due."
    )
    jitter: Seconds = Field(
        default=0.0, description="Starts are spread over this time, by name and tick: the same on every machine."
    )
    start: MomentText | None = Field(default=None, description="No tick is due before this date, or date and time.")
    end: MomentText | None = Field(default=None, description="No tick is due after this date, or date and time.")
    keep: int = Field(
        default=30, ge=1, le=1_000_000, description="How many of the timer's finished jobs `prune` keeps."
    )


class JobSpec(Frozen):
    """One job of nimble-jobs."""

    version: Annotated[Literal[1], BeforeValidator(_version)] = Field(
        description="The version of this format, 1.", examples=[1]
    )
    name: Name = Field(description=f"The job's name: {NAME_EXPECTED}.", examples=["digits-score"])
    kind: Literal["score", "finetune"] = Field(description="The kind of job: score or finetune.", examples=["score"])
    model: ModelSpec = Field(description="The module to run, and its weights.")
    input: InputSpec = Field(description="The records.")
    schedule: ScheduleSpec = Field(default=ScheduleSpec(), description="How the model's schedule is found and built.")
    output: OutputSpec = Field(description="The folder of results, and its format.")
    run: RunSpec = Field(default=RunSpec(), description="Where and when the job runs, and how often it is tried.")
    notify: NotifySpec | None = Field(default=None, description="Notifications about how the job ends.")
    cron: CronSpec | None = Field(default=None, description="A timer that submits the job.")
    train: TrainSpec | None = Field(default=None, description="The fine-tuning; for kind: finetune only.")


def json_schema() -> dict[str, Any]:
    """JSON Schema, draft 2020-12, of what may be written in YAML: durations as texts too, one number for a square."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **JobSpec.model_json_schema(mode="validation"),
        "title": "nimble-jobs job",
    }
