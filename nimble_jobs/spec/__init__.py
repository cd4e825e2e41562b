"""Job specs: YAML in, frozen values out, with every problem and its line."""

from nimble_jobs.spec.load import check_files, check_home, digest, dump, load, loads, restore
from nimble_jobs.spec.model import (
    FieldsSpec,
    InputSpec,
    JobSpec,
    ModelSpec,
    OutputSpec,
    RetrySpec,
    RunSpec,
    ScheduleSpec,
    json_schema,
)
from nimble_jobs.spec.notify import NotifySpec
from nimble_jobs.spec.paths import Source, parse_source
from nimble_jobs.spec.training import (
    AugmentSpec,
    CheckpointSpec,
    EarlyStoppingSpec,
    LrScheduleSpec,
    OptimizerSpec,
    TrainSpec,
    ValidationSpec,
)
from nimble_jobs.spec.transform import TransformSpec

__all__ = [
    "AugmentSpec",
    "CheckpointSpec",
    "EarlyStoppingSpec",
    "FieldsSpec",
    "InputSpec",
    "JobSpec",
    "LrScheduleSpec",
    "ModelSpec",
    "NotifySpec",
    "OptimizerSpec",
    "OutputSpec",
    "RetrySpec",
    "RunSpec",
    "ScheduleSpec",
    "Source",
    "TrainSpec",
    "TransformSpec",
    "ValidationSpec",
    "check_files",
    "check_home",
    "digest",
    "dump",
    "json_schema",
    "load",
    "loads",
    "parse_source",
    "restore",
]
