"""Processes that fire timers and are killed: `python -m tests.timer_farm`, which reads a round a line.

`HOMES SEED TIMES` on stdin: state folders over one database, with a comma between them, and what the clock shows, one
time after the other, in Unix seconds. For each round it forks eight processes, which take turns with the folders. Each
opens the store, fires whatever is due by the round's clock, and now and then runs a job.
It kills itself with SIGKILL before or after the statement that its seed chose, BEGIN and COMMIT included; then another
one begins. After the last time one line on stdout says how many were killed.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import random
import signal
import struct
import sys
import time
import traceback
from collections import Counter
from itertools import cycle
from pathlib import Path
from typing import NoReturn

from sqlalchemy import Engine, create_engine, event

from nimble_jobs import spec as _spec  # noqa: F401  # imported before the forks, so that each starts fast
from nimble_jobs.errors import StoreError
from nimble_jobs.store import Store, open_store
from nimble_jobs.timers import Firer

PROCESSES = 8
KILLS = 12  # at each time of the clock
FEW = 4  # ticks that had waited for a job that ended just now
LONGEST_S = 1.5  # real seconds that the clock stands still
OVER = -1.0
MOST_STATEMENTS = 80  # of a process that is killed


def main() -> None:
    """Serve rounds until stdin ends."""
    if database := os.environ.get("NIMBLE_JOBS_DB"):
        create_engine(database).dispose()  # imports the driver before the forks
    for line in sys.stdin:
        homes, seed, *times = line.split()
        played = play([Path(home) for home in homes.split(",")], int(seed), [float(at) for at in times])
        print(json.dumps(played), flush=True)


def play(homes: list[Path], seed: int, times: list[float]) -> dict[str, int]:
    """One round."""
    clock, kills, turns = mmap.mmap(-1, 16), Counter[str](), cycle(homes)
    chance = random.Random(seed)
    set_clock(clock, times[0])

    def start() -> int:
        dies = chance.randrange(1, MOST_STATEMENTS) if left > 0 else 0
        return fork(next(turns), clock, chance.randrange(1 << 30), dies, log.fileno())

    left = KILLS
    path = homes[0] / "farm.log"
    log = path.open("ab")
    running = {start() for _ in range(PROCESSES)}
    for at in times:
        set_clock(clock, at)
        until, left = time.monotonic() + LONGEST_S, KILLS
        while nothing_due(clock) != at and time.monotonic() < until:
            for pid in list(running):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if not ended:
                    continue
                running.discard(pid)
                left -= 1
                assert os.WIFSIGNALED(status), path.read_text()
                kills["kills"] += 1
                running.add(start())
            time.sleep(0.001)
    set_clock(clock, OVER)
    for pid in running:
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0, path.read_text()
        kills["kills"] += os.WIFSIGNALED(status)
    log.close()
    return dict(kills)


def set_clock(clock: mmap.mmap, at: float) -> None:
    clock[:8] = struct.pack("d", at)


def nothing_due(clock: mmap.mmap) -> float:
    """The last time of the clock by which somebody found that everything was fired."""
    found: float = struct.unpack("d", clock[8:])[0]
    return found


def fork(home: Path, clock: mmap.mmap, seed: int, dies: int, log: int) -> int:
    pid = os.fork()
    if pid == 0:
        os.dup2(log, 1)
        os.dup2(log, 2)
        _become(home, clock, seed, dies)
    return pid


def _become(home: Path, clock: mmap.mmap, seed: int, dies: int) -> NoReturn:
    try:
        random.seed(seed)
        gc.disable()
        with open_store(home) as store:
            _kill_at(dies)
            while (now := struct.unpack("d", clock[:8])[0]) != OVER:
                try:
                    fired = Firer(store).run(now)
                    if len(fired.ticks) < FEW and not fired.more:
                        clock[8:] = struct.pack("d", now)
                    if random.random() < 0.1:
                        _run_a_job(store, now)
                except StoreError:  # locked for too long on a busy machine: nothing was written
                    continue
                time.sleep(random.uniform(0, 0.004))
    except BaseException:  # noqa: BLE001  # this process must not go on as its parent
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _run_a_job(store: Store, now: float) -> None:
    job = store.jobs.claim("0-farm", device="cpu", now=now)
    if job is not None:
        store.jobs.finish(job.id, job.attempt, outputs={}, timings={}, schedule={}, now=now)


def _kill_at(left: int) -> None:
    """Die before or after the `left`-th statement; BEGIN, COMMIT and ROLLBACK count as such."""

    def step(*_: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    for moment in ("before_cursor_execute", "after_cursor_execute", "begin", "commit", "rollback"):
        event.listen(Engine, moment, step)


if __name__ == "__main__":
    main()
