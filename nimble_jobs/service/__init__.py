"""A worker as a service of the user: the text of its systemd unit, and talking to systemd. Never loads torch."""

from nimble_jobs.service.systemd import Manager, State
from nimble_jobs.service.unit import Service, environment_of

__all__ = ["Manager", "Service", "State", "environment_of"]
