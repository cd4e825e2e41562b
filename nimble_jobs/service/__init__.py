"""A worker as a user service: the text of its systemd unit, and calls to systemd. Never loads torch."""

from nimble_jobs.service.systemd import Manager, State
from nimble_jobs.service.unit import Service, environment_of

__all__ = ["Manager", "Service", "State", "environment_of"]
