"""Job specs: YAML in, frozen values out, with every problem and its line."""

from nimble_jobs.spec.load import digest, dump, load, loads, restore
from nimble_jobs.spec.model import (
    FieldsSpec,
    InputSpec,
    JobSpec,
    LrScheduleSpec,
    ModelSpec,
    OptimizerSpec,
    OutputSpec,
    RetrySpec,
    RunSpec,
    ScheduleSpec,
    TrainSpec,
    TransformSpec,
)
from nimble_jobs.spec.paths import Source, parse_source
from nimble_jobs.spec.schema import json_schema

__all__ = [
    "FieldsSpec",
    "InputSpec",
    "JobSpec",
    "LrScheduleSpec",
    "ModelSpec",
    "OptimizerSpec",
    "OutputSpec",
    "RetrySpec",
    "RunSpec",
    "ScheduleSpec",
    "Source",
    "TrainSpec",
    "TransformSpec",
    "digest",
    "dump",
    "json_schema",
    "load",
    "loads",
    "parse_source",
    "restore",
]
