#!/usr/bin/env python3
"""Simulate one job on a thousand devices over ten million shards: claims, the end of the job, deaths, ended leases.

    python scripts/simulate_scale.py [--shards 10000000] [--members 1000] [--only NAME] [--json FILE]

Time is virtual, and draws come from a seed, so a run gives the same figures anywhere. What a member decides, the
product decides: how many shards it claims, which shard it copies, when it looks again, how long a lease lasts. A test
compares what the store does with the real one. What a transaction costs was measured (docs/measurements/scale.json).
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from measuring import ROOT, environment, save
from simulated_store import SimulatedStore

sys.path.insert(0, str(ROOT))

from nimble_jobs.store.leases import LEASE_S, RENEW_S
from nimble_jobs.store.shards import Left
from nimble_jobs.worker.upkeep import INTERVAL_S
from nimble_jobs.workloads.stragglers import pause_s, worth_a_copy

RECORDS = 1024  # in a shard
BEGIN_AGAIN_S = 60.0  # after a machine vanished, until another worker is there and has loaded its model
MEASURED_MEMBERS = 1000  # as in the measured tables
NETWORK_MS = 6.0  # eight answers over a network, half a millisecond each, and a sync of two
UNWRITTEN = 4  # shards that a member may have scored and not yet recorded


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Milliseconds for which one transaction keeps others out of the job's rows."""

    finish: float
    claim: float
    claim_row: float  # for each row that it counts
    second: float
    leave: float
    join: float

    def claim_ms(self, open_: int, members: int) -> float:
        """A claim counts open shards until it knows that there are enough."""
        return self.claim + self.claim_row * min(open_, 128 * members)

    def slower_by(self, ms: float) -> Costs:
        """With a network and a disk."""
        added = {name: value + ms for name, value in asdict(self).items() if name != "claim_row"}
        return Costs(**added, claim_row=self.claim_row)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is simulated."""

    name: str
    shard_s: float  # that a device needs for a shard
    slow: float = 0.0  # share of devices that are slower
    slowness: float = 10.0
    copies: bool = True
    days_between_deaths: float = 0.0  # of one device; 0: none
    extra_ms: float = 0.0  # a transaction's statements on the network and its sync
    shards: int | None = None  # instead of those of the command line
    renewals_fail: float = 0.0  # share of members whose lease ends once, half-way, all at the same moment


@dataclass
class Device:
    """A member's process."""

    name: str
    speed_s: float
    queue: deque[int] = field(default_factory=deque)
    epoch: int = 0  # what was planned for an earlier one does not happen
    unwritten: int = 0
    waits: bool = False  # until a shard is recorded
    away: bool = False


class Simulation:
    """Events in order of time, and one lock for those who write."""

    def __init__(self, case: Case, costs: Costs, *, shards: int, members: int, seed: int) -> None:
        self.case, self.costs, self.rng = case, costs.slower_by(case.extra_ms), random.Random(seed)
        self.store = SimulatedStore(shards, RECORDS, max_attempts=3, tolerated=shards)
        self.now = self.free_at = 0.0
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.numbered = 0
        self.writes: Counter[str] = Counter()
        self.busy_s = self.wasted_s = self.waited_s = 0.0
        self.reads = 0
        self.claimed_out_s: float | None = None
        self.working = 0
        slow = round(members * case.slow)
        names = [f"{number:05d}" for number in range(members)]
        slowness = [case.slowness if 0 < number <= slow else 1.0 for number in range(members)]  # the first one leads
        self.devices = {name: Device(name, case.shard_s * by) for name, by in zip(names, slowness, strict=True)}
        self.ideal_s = shards * case.shard_s / sum(1 / by for by in slowness)
        for device in self.devices.values():
            self.at(0.0, self.begin, device)
        if case.renewals_fail:
            self.at(self.ideal_s / 2, self.outage)

    def at(self, when: float, what: Callable[..., None], *given: Any) -> None:
        """Let something happen."""
        self.numbered += 1
        heapq.heappush(self.events, (when, self.numbered, what, given))

    def write(self, kind: str, ms: float, then: Callable[..., None], *given: Any) -> None:
        """Wait for the lock, hold it for so long, go on."""
        begins = max(self.now, self.free_at)
        self.free_at = begins + ms / 1e3
        self.writes[kind] += 1
        self.busy_s += ms / 1e3
        self.waited_s += begins - self.now
        self.at(self.free_at, then, *given)

    def run(self) -> dict[str, Any]:
        """Until all shards are done. Returns figures."""
        began = time.perf_counter()
        shards = len(self.store.state)
        while self.store.done + self.store.failed < shards:
            self.now, _, what, given = heapq.heappop(self.events)
            what(*given)
        members = len(self.devices)
        return {
            **asdict(self.case),
            "shards": shards,
            "workers": members,  # those that came for dead ones, too
            "hours": round(self.now / 3600, 3),
            "over_ideal": round(self.now / self.ideal_s, 3),
            "tail_s": round(self.now - (self.claimed_out_s or self.now), 1),
            "writes_per_s": round(sum(self.writes.values()) / self.now, 1),
            "claims_per_s": round(self.writes["claim"] / self.now, 2),
            "shards_per_s": round(shards / self.now, 1),
            "lock_busy": round(self.busy_s / self.now, 3),
            "lock_wait_ms": round(1e3 * self.waited_s / sum(self.writes.values()), 1),
            "looks": self.reads,
            "writes": dict(self.writes),
            "wasted": round(self.wasted_s / (self.now * members), 4),
            "failed_shards": self.store.failed,
            "simulated_in_s": round(time.perf_counter() - began, 1),
        }

    def begin(self, device: Device) -> None:
        """A worker looks for a job to join."""
        if device.away:
            return
        self.write("join", self.costs.join, self.joined, device)

    def joined(self, device: Device) -> None:
        self.store.join(device.name, "cuda:0", self.now)
        self.working += 1
        if self.case.days_between_deaths:
            life_s = self.rng.expovariate(1 / (self.case.days_between_deaths * 86400))
            self.at(self.now + life_s, self.die, device)
        self.next(device, True)

    def next(self, device: Device, suspects: bool) -> None:
        """Claim, if there is anything to claim."""
        self.reads += 1
        is_open, is_running = self.store.unfinished()
        if is_open:
            ms = self.costs.claim_ms(self.store.open, self.working)
            self.write("claim", ms, self.claimed, device, device.epoch, suspects)
        elif is_running:
            self.look(device)

    def claimed(self, device: Device, epoch: int, suspects: bool) -> None:
        if device.away or epoch != device.epoch:
            return
        taken = self.store.claim(device.name, self.working, self.now, idle=suspects)
        if self.claimed_out_s is None and not self.store.open:
            self.claimed_out_s = self.now
        if taken:
            device.queue.extend(taken)
            self.score(device)
        else:
            self.look(device)

    def look(self, device: Device) -> None:
        """No shard is open: copy one, or look again later."""
        chosen = None
        if self.case.copies:
            chosen = worth_a_copy(self.store.in_flight(), self.store.members(), device.name, self.now)
        if chosen is not None:
            self.write("second", self.costs.second, self.copied, device, device.epoch, chosen)
        else:
            self.pause(device)

    def pause(self, device: Device) -> None:
        leads, chance = self.store.lead == device.name, self.rng.random()
        seconds = pause_s(len(self.store.entries), leads=leads, chance=chance)
        self.at(self.now + seconds, self.again, device, device.epoch)

    def again(self, device: Device, epoch: int) -> None:
        if not device.away and epoch == device.epoch:
            self.next(device, True)

    def copied(self, device: Device, epoch: int, index: int) -> None:
        if device.away or epoch != device.epoch:
            return
        if self.store.second(device.name, index, self.now, idle=True):
            device.queue.append(index)
            self.score(device)
        else:
            self.pause(device)  # somebody else was first

    def score(self, device: Device) -> None:
        """The next shard in hand; if there is none, claim."""
        if device.unwritten >= UNWRITTEN:
            device.waits = True
        elif device.queue:
            self.at(self.now + device.speed_s, self.scored, device, device.epoch, device.queue.popleft())
        elif device.unwritten and not self.store.open:  # its last shards first, as a round ends
            device.waits = True
        else:
            self.next(device, False)

    def scored(self, device: Device, epoch: int, index: int) -> None:
        if device.away or epoch != device.epoch:
            return
        device.unwritten += 1
        self.write("finish", self.costs.finish, self.finished, device, epoch, index)
        self.score(device)

    def finished(self, device: Device, epoch: int, index: int) -> None:
        if device.away or epoch != device.epoch:
            return
        before = self.store.done
        others = self.store.finish(device.name, index, self.now)
        if self.store.done == before:
            self.wasted_s += device.speed_s
        for name in others:
            self.overtaken(self.devices[name])
        device.unwritten -= 1
        if device.waits:
            device.waits = False
            self.score(device)

    def overtaken(self, device: Device) -> None:
        """Others have finished a shard of this member; if it holds no other one, it stops and goes on anew."""
        if not device.away and not self.store.entries[device.name].holds:
            self.stop(device)
            self.wasted_s += device.speed_s / 2
            self.at(self.now, self.again, device, device.epoch)

    def stop(self, device: Device) -> None:
        device.epoch += 1
        device.queue.clear()
        device.unwritten, device.waits = 0, False

    def die(self, device: Device) -> None:
        """Its machine vanishes. Others notice when the lease has ended."""
        if device.away:
            return
        self.stop(device)
        device.away = True
        noticed_s = LEASE_S - self.rng.uniform(0, RENEW_S) + self.rng.uniform(0, INTERVAL_S)
        self.at(self.now + noticed_s, self.write, "leave", self.costs.leave, self.buried, device)
        fresh = Device(f"{device.name}+", device.speed_s)
        self.devices[fresh.name] = fresh
        self.at(self.now + BEGIN_AGAIN_S, self.begin, fresh)

    def buried(self, device: Device) -> None:
        self.wasted_s += len(self.store.entries[device.name].holds) and device.speed_s / 2
        self.working -= 1
        if self.store.leave(device.name, self.now, failed=True) is not Left.NOTHING:
            raise RuntimeError("the attempt has ended")

    def outage(self) -> None:
        """The leases of some members end at the same moment."""
        alive = [device for device in self.devices.values() if not device.away]
        for device in self.rng.sample(alive, round(len(alive) * self.case.renewals_fail)):
            self.die(device)


def costs(path: Path) -> Costs:
    """Costs as they were measured, without those of a network or a disk."""
    measured = json.loads(path.read_text())["rows"]

    def ms(what: str, shards: int) -> float:
        return float(next(row["median_ms"] for row in measured if row["what"] == what and row["shards"] == shards))

    sizes = sorted({row["shards"] for row in measured})
    least, most = sizes[0], sizes[-1]
    counted = {size: min(size * 0.3, 128 * MEASURED_MEMBERS) for size in (least, most)}
    row_ms = (ms("claim", most) - ms("claim", least)) / (counted[most] - counted[least])
    return Costs(
        finish=ms("finish a shard", most),
        claim=ms("claim", least) - row_ms * counted[least],
        claim_row=row_ms,
        second=ms("take a copy", most),
        leave=ms("leave with an error", most),
        join=ms("look for a job to join", most),
    )


def cases(shards: int) -> list[Case]:
    """What the page shows. Large ones first."""
    few = shards // 10
    return [
        Case(name="alike", shard_s=5.0),
        Case(name="slow, no copies", shard_s=5.0, slow=0.01, copies=False),
        Case(name="slow, copies", shard_s=5.0, slow=0.01),
        *[Case(name=f"{s:g} s", shard_s=s, shards=few) for s in (0.5, 1.0, 2.0, 3.0, 5.0, 20.0)],
        *[Case(name=f"{s:g} s, network", shard_s=s, shards=few, extra_ms=NETWORK_MS) for s in (5.0, 10.0, 20.0)],
        Case(name="deaths", shard_s=5.0, shards=few, days_between_deaths=1.0),
        Case(name="deaths, slow", shard_s=5.0, shards=few, days_between_deaths=1.0, slow=0.01),
        Case(name="leases end", shard_s=5.0, shards=few, renewals_fail=0.3),
    ]


def main() -> int:
    """Simulate, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shards", type=int, default=10_000_000)
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", help="name of a case; may be repeated")
    parser.add_argument("--costs", type=Path, default=ROOT / "docs" / "measurements" / "scale.json")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    known = costs(given.costs)
    print(known)
    rows = []
    for case in cases(given.shards):
        if given.only is None or case.name in given.only:
            shards = case.shards or given.shards
            rows.append(Simulation(case, known, shards=shards, members=given.members, seed=given.seed).run())
            print(rows[-1], flush=True)
    save(given.json, {"environment": environment(), "seed": given.seed, "costs_ms": asdict(known), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
