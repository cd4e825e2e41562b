"""Sends what is in the outbox: webhooks, commands, pings."""

from nimble_jobs.courier.attempt import Refused, send
from nimble_jobs.courier.courier import Courier

__all__ = ["Courier", "Refused", "send"]
