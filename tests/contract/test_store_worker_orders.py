"""What workers are asked to do, as the store keeps it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nimble_jobs.store import Order, Store, Wanted, open_store
from nimble_jobs.store.home import resolve


@pytest.fixture
def store(tmp_path: Path, url: str | None) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path)), url) as opened:
        yield opened


def test_a_worker_runs_unless_asked(store: Store) -> None:
    """Without an order it takes jobs; an order is of one worker and of its moment."""
    assert store.orders.of("1-a") == Order()
    store.orders.want(Wanted.PAUSE, ["1-a"], 10.0)
    assert store.orders.of_each(["1-a", "2-b"]) == {"1-a": Order(wanted=Wanted.PAUSE, at=10.0), "2-b": Order()}
    store.orders.want(Wanted.RUN, ["1-a"], 11.0)
    assert store.orders.of("1-a").wanted is Wanted.RUN


def test_a_pause_of_all_holds_for_those_that_start_later(store: Store) -> None:
    """One worker may be resumed on its own; resuming all ends every pause."""
    store.orders.want(Wanted.RUN, ["1-a"], 1.0)
    store.orders.want(Wanted.PAUSE, None, 10.0)
    assert store.orders.of_all() == Order(wanted=Wanted.PAUSE, for_all=True, at=10.0)
    assert {order.wanted for order in store.orders.of_each(["1-a", "9-new"]).values()} == {Wanted.PAUSE}
    store.orders.want(Wanted.RUN, ["1-a"], 11.0)
    assert [store.orders.of(worker).wanted for worker in ("1-a", "9-new")] == [Wanted.RUN, Wanted.PAUSE]
    store.orders.want(Wanted.PAUSE, ["2-b"], 12.0)
    store.orders.want(Wanted.RUN, None, 13.0)
    assert {order.wanted for order in store.orders.of_each(["1-a", "2-b", "9-new"]).values()} == {Wanted.RUN}


def test_restarts_are_counted(store: Store) -> None:
    """Beside what is wanted; each raises the number by one."""
    store.orders.want(Wanted.PAUSE, ["1-a"], 1.0)
    store.orders.restart(["1-a", "2-b"], 2.0)
    store.orders.restart(["1-a"], 3.0)
    assert store.orders.of("1-a") == Order(wanted=Wanted.PAUSE, restarts=2, at=3.0)
    assert store.orders.of("2-b") == Order(restarts=1)


def test_each_order_has_its_event(store: Store) -> None:
    """Who was asked for what, when."""
    store.orders.want(Wanted.PAUSE, None, 1.0)
    store.orders.want(Wanted.DRAIN, ["1-a"], 2.0)
    store.orders.restart(["1-a"], 3.0)
    assert [(event.at, event.kind, event.message) for event in store.jobs.events()] == [
        (1.0, "worker", "all workers: asked to take no jobs until resumed"),
        (2.0, "worker", "worker 1-a: asked to finish its job and leave"),
        (3.0, "worker", "worker 1-a: asked to restart its process"),
    ]


def test_orders_of_the_dead_are_forgotten(store: Store) -> None:
    """The next worker has another id; what holds for all workers stays."""
    store.orders.want(Wanted.PAUSE, None, 1.0)
    store.orders.want(Wanted.DRAIN, ["1-a", "2-b"], 2.0)
    store.orders.forget(lambda worker: worker == "2-b")
    assert [store.orders.of(worker).wanted for worker in ("1-a", "2-b")] == [Wanted.PAUSE, Wanted.DRAIN]


def test_only_a_worker_that_runs_can_be_drained(store: Store) -> None:
    """Not all, those to come included."""
    with pytest.raises(ValueError, match="drain"):
        store.orders.want(Wanted.DRAIN, None, 1.0)
