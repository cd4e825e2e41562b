"""Sends notifications from the outbox: webhooks, commands, pings."""

from nimble_jobs.courier.courier import Courier

__all__ = ["Courier"]
