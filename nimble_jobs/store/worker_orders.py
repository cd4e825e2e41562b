"""Orders for workers: run, pause, drain, restart their process. Each worker polls its orders."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import String, delete, select, update
from sqlalchemy.orm import Mapped, Session, mapped_column

from nimble_jobs.store.changes import changed
from nimble_jobs.store.database import Database
from nimble_jobs.store.tables import Base
from nimble_jobs.store.transitions import record_event
from nimble_jobs.store.words import Words

ALL = "*"  # the row for all workers of the folder, including future ones


class Wanted(StrEnum):
    """A worker's order about new jobs."""

    RUN = "run"
    PAUSE = "pause"  # take none until resumed
    DRAIN = "drain"  # take none, and stop after the current one


class OrderRow(Base):
    """The orders for a worker."""

    __tablename__ = "worker_orders"

    worker: Mapped[str] = mapped_column(Words, primary_key=True)
    wanted: Mapped[str | None] = mapped_column(String(8))  # None: the order for ALL counts
    restarts: Mapped[int]  # number of requests for a fresh process
    at: Mapped[float]


@dataclass(frozen=True, kw_only=True)
class Order:
    """The order for one worker."""

    wanted: Wanted = Wanted.RUN
    restarts: int = 0  # number of requests for a fresh process
    for_all: bool = False  # whether `wanted` is the order for all workers
    at: float | None = None  # when it was given, in Unix seconds


class WorkerOrders:
    """The table of orders. Time is always an argument: Unix seconds."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def of(self, worker: str) -> Order:
        """The order for a worker."""
        return self.of_each([worker])[worker]

    def of_each(self, workers: Collection[str]) -> dict[str, Order]:
        """The orders for these workers, by id."""
        query = select(OrderRow).where(OrderRow.worker.in_([*workers, ALL]))
        rows = self._db.read(lambda session: {row.worker: _values(row) for row in session.scalars(query)})
        return {worker: _order(rows.get(worker) if worker != ALL else None, rows.get(ALL)) for worker in workers}

    def of_all(self) -> Order:
        """The order for a worker that starts now."""
        return self.of(ALL)

    def want(self, wanted: Wanted, workers: Iterable[str] | None, now: float) -> None:
        """Give these workers an order. None: all workers, in place of their own orders, and workers that start later.

        Only running workers can be asked to drain.
        """
        named = None if workers is None else list(workers)
        if named is None and wanted is Wanted.DRAIN:
            raise ValueError("a worker that starts later cannot have been asked to drain")

        def work(session: Session) -> None:
            if named is None:
                changed(session, update(OrderRow).values(wanted=None, at=now))
            for worker in [ALL] if named is None else named:
                _row(session, worker, now).wanted = wanted.value
                who = "all workers" if worker == ALL else f"worker {worker}"
                record_event(session, "worker", f"{who}: {_ASKED[wanted]}", now=now)

        self._db.write(work)

    def restart(self, workers: Iterable[str], now: float) -> None:
        """Ask workers to replace the process that runs their jobs."""
        named = list(workers)

        def work(session: Session) -> None:
            for worker in named:
                _row(session, worker, now).restarts += 1
                record_event(session, "worker", f"worker {worker}: asked to restart its process", now=now)

        self._db.write(work)

    def forget(self, alive: Callable[[str], bool]) -> None:
        """Drop orders for workers that are gone."""
        ids = self._db.read(lambda session: list(session.scalars(select(OrderRow.worker))))
        gone = [worker for worker in ids if worker != ALL and not alive(worker)]
        if gone:
            self._db.write(lambda session: changed(session, delete(OrderRow).where(OrderRow.worker.in_(gone))))


_ASKED = {
    Wanted.RUN: "asked to take jobs",
    Wanted.PAUSE: "asked to take no jobs until resumed",
    Wanted.DRAIN: "asked to finish its job and leave",
}
_Values = tuple[str | None, int, float]


def _row(session: Session, worker: str, now: float) -> OrderRow:
    row = session.get(OrderRow, worker)
    if row is None:
        row = OrderRow(worker=worker, wanted=None, restarts=0, at=now)
        session.add(row)
    row.at = now
    session.flush()
    return row


def _values(row: OrderRow) -> _Values:
    return (row.wanted, row.restarts, row.at)


def _order(own: _Values | None, everyone: _Values | None) -> Order:
    restarts = own[1] if own else 0
    if own and own[0] is not None:
        return Order(wanted=Wanted(own[0]), restarts=restarts, at=own[2])
    if everyone and everyone[0] is not None:
        return Order(wanted=Wanted(everyone[0]), restarts=restarts, for_all=True, at=everyone[2])
    return Order(restarts=restarts)
