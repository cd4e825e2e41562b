"""The simulation of a job on many devices: small, it finishes each shard once, and shows what copies are for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scripts import load

SHARDS, MEMBERS = 2000, 20


def simulated(seed: int = 1, **case: Any) -> dict[str, Any]:
    script = load("simulate_scale")
    costs = script.Costs(finish=2.0, claim=3.0, claim_row=1e-4, second=2.0, leave=10.0, join=10.0)
    given = script.Case(name="n", **{"shard_s": 5.0, **case})
    simulation = script.Simulation(given, costs, shards=SHARDS, members=MEMBERS, seed=seed)
    found = simulation.run()
    assert simulation.store.done == SHARDS
    assert not simulation.store.open
    assert sum(entry.shards_done for entry in simulation.store.entries.values()) == SHARDS
    assert isinstance(found, dict)
    return found


def test_equal_devices_stay_near_the_ideal() -> None:
    """And a run gives the same figures each time."""
    first, second = (simulated() for _ in range(2))
    assert 1.0 <= first["over_ideal"] < 1.02
    assert first | {"simulated_in_s": 0} == second | {"simulated_in_s": 0}


def test_slow_devices() -> None:
    """One of twenty is ten times slower: with copies the job ends when the others do."""
    with_copies, without = (simulated(slow=0.05, copies=copies)["over_ideal"] for copies in (True, False))
    assert with_copies < 1.05 < without


def test_deaths_and_ended_leases_lose_nothing() -> None:
    """Shards of vanished machines are scored by others, after their leases have ended."""
    for case in ({"days_between_deaths": 0.05}, {"renewals_fail": 0.5}):
        found = simulated(**case)
        assert found["workers"] > MEMBERS
        assert found["writes"]["leave"] >= 3
        assert found["over_ideal"] < 3


@pytest.mark.parametrize(("shard_s", "most"), [(0.02, 500.0), (5.0, 500.0)])
def test_the_lock_bounds_the_rate(shard_s: float, most: float) -> None:
    """Two milliseconds for each finished shard are five hundred a second at most, however fast the devices are."""
    found = simulated(shard_s=shard_s)
    assert found["shards_per_s"] < most
    assert found["lock_busy"] <= 1.0
    assert (found["lock_busy"] > 0.9) == (shard_s < 1)
