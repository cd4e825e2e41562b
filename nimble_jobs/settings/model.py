"""The configuration of a state folder as frozen values, with every default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr

from nimble_jobs.patience import DEFAULT_LIMIT_S
from nimble_jobs.settings.fields import Daily, DatabaseAddress, Endpoint, Folder, Host, Limit, Place, Size, at_most
from nimble_jobs.spec.fields import Device, Frozen, LimitOrOff, Seconds
from nimble_jobs.spec.notify import NotifySpec
from nimble_jobs.spec.units import BadValue, wrong

_HOUR_S, _DAY_S = 3600.0, 86400.0
DEFAULT = "default"


def _version(value: object) -> object:
    if type(value) is not int or value != 1:
        raise BadValue(wrong(value), "1")
    return value


Count = Annotated[int, Field(ge=1)]


class LimitSettings(Frozen):
    """Time limits."""

    start: Limit = Field(default=600.0, description="Time limit for a worker's child process to get ready.")
    stall: Limit | None = Field(
        default=1800.0, description="Default of run.stall: how long a job may go without progress; null: for ever."
    )
    grace: Seconds = Field(
        default=60.0, description="How long a job may take to reach a safe point after its worker is asked to stop."
    )
    patience: Seconds = Field(
        default=DEFAULT_LIMIT_S,
        description="How long a worker waits for space on a full disk, or for a missing database.",
    )


class RetentionSettings(Frozen):
    """What `prune` keeps, and when it runs automatically."""

    keep: Limit | None = Field(
        default=30 * _DAY_S, description="How long jobs that succeeded or were cancelled stay; null: for ever."
    )
    keep_failed: Limit | None = Field(
        default=90 * _DAY_S, description="How long failed and quarantined jobs stay; null: for ever."
    )
    per_name: Count | None = Field(default=None, description="How many finished jobs of a name stay; null: all.")
    logs: Limit | None = Field(default=30 * _DAY_S, description="How long logs stay; null: for ever.")
    daily: Daily = Field(default="off", description="Time of day, UTC, when a worker prunes: HH:MM, or off.")


class QueueSettings(Frozen):
    """The order in which jobs run."""

    aging: Limit = Field(default=_HOUR_S, description="How long a job must wait to gain one step of priority.")


class CacheSettings(Frozen):
    """Stored schedules."""

    size: Size | None = Field(default=None, description="Largest size of all schedules together; null: no limit.")
    shared: Place | None = Field(
        default=None,
        description="Folder, or address such as s3://BUCKET/FOLDER, for files of schedules that state folders over one "
        "database share; null: none.",
    )
    build_after: LimitOrOff = Field(
        default=2.0,
        description="How long a worker is idle before it builds schedules that earlier jobs missed; off: never.",
    )


class NotifySettings(NotifySpec):
    """Targets of notifications about all jobs, and targets that a spec's `notify` may name."""

    hosts: tuple[Host, ...] = Field(
        default=(), description="Hosts that webhooks and pings may go to, as HOST or HOST:PORT; by default none."
    )
    commands: tuple[Folder, ...] = Field(
        default=(), description="Folders whose programs may run as commands; by default none."
    )
    timeout: Annotated[Limit, at_most(600.0)] = Field(
        default=10.0, description="Longest wait for a connection, and then for an answer."
    )
    command_timeout: Annotated[Limit, at_most(3600.0)] = Field(default=60.0, description="Longest time for a command.")
    give_up: Limit = Field(default=_DAY_S, description="How long a notification is tried before it is given up.")


class TracingSettings(Frozen):
    """OpenTelemetry traces."""

    endpoint: Endpoint | None = Field(
        default=None,
        description="OTLP/HTTP collector for traces of attempts; null: the one that OTEL_* variables name, if any.",
    )


class Settings(Frozen):
    """The configuration of one state folder, as `load.read_settings` reads it."""

    version: Annotated[Literal[1], BeforeValidator(_version)] = Field(
        default=1, description="The version of this format, 1."
    )
    device: Device = Field(default="auto", description="Device of workers that start without --device.")
    gpu_memory: Size | None = Field(
        default=None,
        description="Device memory for a worker's resident models and graphs; null: 80 % of the device, or half of the "
        "memory on a CPU.",
    )
    allow_python: tuple[Folder, ...] = Field(
        default=(), description="Folders whose Python files may be executed as models, in addition to --allow-python."
    )
    database: DatabaseAddress | None = Field(
        default=None,
        description="PostgreSQL database that several state folders share, or a SQLite file of this one, without a "
        "password; null: a file in the folder.",
    )
    limits: LimitSettings = Field(default=LimitSettings(), description="Time limits.")
    queue: QueueSettings = Field(default=QueueSettings(), description="The order in which jobs run.")
    cache: CacheSettings = Field(default=CacheSettings(), description="Stored schedules.")
    retention: RetentionSettings = Field(default=RetentionSettings(), description="What prune keeps, and when it runs.")
    notify: NotifySettings = Field(default=NotifySettings(), description="Notifications about jobs.")
    tracing: TracingSettings = Field(default=TracingSettings(), description="Traces of attempts.")

    _origins: Mapping[str, str] = PrivateAttr(default_factory=dict)

    def origin(self, field: str) -> str:
        """Where the value of a dotted field comes from: `default`, `FILE:LINE`, `environment NAME`, `command line`."""
        return self._origins.get(field, DEFAULT)

    def with_origins(self, origins: Mapping[str, str]) -> Settings:
        """The same values with other `origins`."""
        twin = self.model_copy()
        twin._origins = dict(origins)
        return twin

    def flat(self) -> dict[str, object]:
        """Each value by its dotted field, in the order of the file; all but `version`."""
        values: dict[str, object] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Frozen):
                values |= {f"{name}.{inner}": getattr(value, inner) for inner in type(value).model_fields}
            elif name != "version":
                values[name] = value
        return values


def json_schema() -> dict[str, Any]:
    """JSON Schema, draft 2020-12, of what may be written in YAML: durations and sizes as texts too."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Settings.model_json_schema(mode="validation"),
        "title": "nimble-jobs configuration",
    }
