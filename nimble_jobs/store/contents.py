"""What a state folder holds, for whoever checks it or makes room in it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nimble_jobs.job import Job
from nimble_jobs.patience import Lent
from nimble_jobs.store.artifacts import Artifacts
from nimble_jobs.store.builds import Builds
from nimble_jobs.store.database import Database
from nimble_jobs.store.expiry import Expiry
from nimble_jobs.store.jobs import Jobs
from nimble_jobs.store.leases import Leases
from nimble_jobs.store.membership import Membership
from nimble_jobs.store.notices import SETTINGS
from nimble_jobs.store.outbox import Outbox
from nimble_jobs.store.publications import Publications
from nimble_jobs.store.schedules import Schedules
from nimble_jobs.store.seen import SeenFiles
from nimble_jobs.store.shards import Shards
from nimble_jobs.store.shared_artifacts import SharedArtifacts, User
from nimble_jobs.store.task_times import StoredTaskTimes
from nimble_jobs.store.timers import Timers
from nimble_jobs.store.wanted import WantedSchedules
from nimble_jobs.store.worker_orders import WorkerOrders
from nimble_jobs.store.workers import Workers

if TYPE_CHECKING:
    from nimble_jobs.settings import Watched


class Contents:
    """The tables and folders of an open state folder."""

    def __init__(self, home: Path, database: Database, patience: Lent | None = None) -> None:
        self.home = home
        self._database = database
        self._patience = patience or Lent()
        self._settings: Watched | None = None
        self._shared_at: str | None = None
        self._shared_place: SharedArtifacts | None = None
        database.info[SETTINGS] = lambda: self.settings.now()
        self.jobs = Jobs(database)
        self.shards = Shards(database)
        self.outbox = Outbox(database)
        self.timers = Timers(database)
        self.orders = WorkerOrders(database)
        self.expiry = Expiry(database)
        self.schedules = Schedules(database)
        self.task_times = StoredTaskTimes(database)
        self.wanted = WantedSchedules(database)
        self.artifacts = Artifacts(home / "artifacts", self._patience, self.shared)
        self.seen = SeenFiles(database)
        self.publications = Publications(database, home)
        self.builds = Builds(home / "builds", self._patience)
        self.workers = Workers(home / "workers", None if database.is_sqlite else Leases(database))

    def membership(self, job: Job) -> Membership:
        """What the member that holds this record writes while it works."""
        return Membership(self._database, self.jobs, self.shards, job)

    def shared(self) -> SharedArtifacts | None:
        """Where `cache.shared` says that artifacts are shared; None on SQLite.

        Raises DataError for an address that cannot be used.
        """
        if self._database.is_sqlite:  # no other state folder has its rows
            return None
        place = self.settings.usable().cache.shared
        if place != self._shared_at:
            self._shared_place = None if place is None else SharedArtifacts(place, self._user)
            self._shared_at = place
        return self._shared_place

    def _user(self) -> User:
        return User(id=self._database.identity(), name=self._database.name)

    @property
    def settings(self) -> Watched:
        """The configuration of the state folder, reread if its file has changed."""
        if self._settings is None:
            # Imported here, because it loads pydantic, which listings do not need.
            from nimble_jobs.settings import Watched

            self._settings = Watched(self.home)
        return self._settings
