"""The state folder: jobs, attempts, events, schedules, artifacts and worker locks."""

from nimble_jobs.store.store import Store, open_store

__all__ = ["Store", "open_store"]
