"""The configuration of a state folder: `config.yaml`, environment and command line as one frozen value."""

from nimble_jobs.settings.allowed import check_targets
from nimble_jobs.settings.folder import choose
from nimble_jobs.settings.load import FILE, check_file, read_settings, variable
from nimble_jobs.settings.model import (
    CacheSettings,
    LimitSettings,
    NotifySettings,
    QueueSettings,
    RetentionSettings,
    Settings,
    json_schema,
)
from nimble_jobs.settings.watch import Watched

__all__ = [
    "FILE",
    "CacheSettings",
    "LimitSettings",
    "NotifySettings",
    "QueueSettings",
    "RetentionSettings",
    "Settings",
    "Watched",
    "check_file",
    "check_targets",
    "choose",
    "json_schema",
    "read_settings",
    "variable",
]
