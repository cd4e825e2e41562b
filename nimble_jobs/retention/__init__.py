"""Removes jobs that ended long ago, and their traces, but never an output."""

from nimble_jobs.retention.pace import slot_of
from nimble_jobs.retention.rules import Rules, rules_of
from nimble_jobs.retention.sweep import KINDS, Done, Sweep

__all__ = ["KINDS", "Done", "Rules", "Sweep", "rules_of", "slot_of"]
