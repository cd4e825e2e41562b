"""A worker whose jobs do as their `model.args` say, without models.

`python worker_fakes.py HOME IDLE_S GRACE_S DEVICE TARGET TIME_S`
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nimble_jobs import spec as specs
from nimble_jobs.data import Staging
from nimble_jobs.errors import DataError, DeviceFault
from nimble_jobs.job import Job
from nimble_jobs.store import Store
from nimble_jobs.worker import child, post, running, serve, trouble
from tests.store_samples import queued

DEVICE = "cpu"


class Mute(Exception):
    """Nobody learns what it says."""

    def __str__(self) -> str:
        raise TypeError("no text")


class Odd(BaseException):
    """What a model should not raise."""


ERRORS: dict[str, BaseException] = {
    "data": DataError("no such file"),
    "bug": KeyError("weights"),
    "surrogate": ValueError("not read: \udc80"),
    "nul": ValueError("a\0b"),
    "long": ValueError("x" * (1 << 20)),
    "mute": Mute(),
    "base": Odd("stop"),
}


def run(context: Any) -> Any:
    """`do`: batches, hang, raise, die, exit, fault, print. The file `note` gets a line at the start and at the end."""
    args = context.spec.model.args
    note = Path(args["note"])

    def write(text: str) -> None:
        with note.open("a") as file:
            file.write(f"{context.job.attempt} {os.getpid()} {text}\n")

    if args.get("stage"):
        (Path(context.spec.output.path).with_name(f".{context.job.name}.{context.job.id}") / "attempt-1").mkdir(
            parents=True, exist_ok=True
        )
    write("start")
    if args.get("borrow"):
        _borrow(context, args["borrow"], write)
    match args["do"]:
        case "hang":
            time.sleep(600)
        case "stall" if context.job.attempt <= args.get("times", 1):
            _stand_still(args["how"], write)
        case "read":  # a pipe stands for a mount that does not answer any more
            with Path(args["path"]).open("rb") as file:
                file.read()
        case "raise":
            raise ERRORS[args["error"]]
        case "die" if context.job.attempt <= args["times"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            sys.exit(3)
        case "fault" if context.job.attempt == 1:
            raise DeviceFault("CUDA error: device-side assert triggered")
        case "print":
            print("printed by a model")
    return _batches(context, args, write)


def _borrow(context: Any, count: int, write: Callable[[str], None]) -> None:
    """Get devices of other posts."""
    while sum(info.info.get("lent") == context.job.id for info in context.store.workers.live()) < count:
        context.borrow(["cpu"], count)
        time.sleep(0.02)
    write("lent")


def _stand_still(how: str, write: Callable[[str], None]) -> None:
    """For far longer than a test waits."""
    sleeper = subprocess.Popen(["sleep", "600"])
    write(f"started {sleeper.pid}")
    match how:
        case "spin":  # in C code that keeps the interpreter's lock
            re.match(r"(a+)+$", "a" * 64 + "b")
        case "sleep":
            time.sleep(600)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)


def _batches(context: Any, args: dict[str, Any], write: Callable[[str], None]) -> Any:
    """Batch after batch, and a shard for each where the job has a path."""
    from nimble_jobs.workloads.context import Outcome, Stop

    count = args.get("count", 1)
    staging = None
    if "path" in args:
        output = context.spec.output.model_copy(update={"path": Path(args["path"]), "format": "npy"})
        staging = Staging(output, context.job.id, context.job.attempt, ledger=context.store.publications)
    context.report(phase="run", total=count)
    for batch in range(count):
        stop = context.stop()
        if stop is not Stop.GO:
            write(f"stop {stop}")
            return Outcome(stop=stop)
        time.sleep(args.get("sleep_s", 0.0))
        while "gate" in args and not Path(args["gate"]).exists() and context.stop() is Stop.GO:
            time.sleep(0.02)
        if staging is not None and batch not in staging.done:
            columns = {"id": [str(batch)], "logits": np.full((1, 4), batch, np.float32)}
            context.patience.through(partial(staging.write_shard, batch, columns))
        context.report(done=batch + 1)
    context.report(phase="publish")
    if staging is not None:
        context.patience.through(lambda: staging.publish({}, shards=count))
    context.patience.through(lambda: write("end"))  # its file may be on the disk that is full
    publication = None if staging is None else staging.publication
    done = Outcome(outputs={"path": "out"}, timings={"run_s": 0.5}, schedule={"key": "k", "hit": "miss"})
    return dataclasses.replace(done, publication=publication)


def make_station(store: Store, worker: str, device: str, gpu_memory_bytes: int | None) -> Any:
    from nimble_jobs.errors import UsageError
    from nimble_jobs.worker.executor import Station
    from nimble_jobs.worker.residency import Residents

    if device == "cuda:9":
        raise UsageError("run.device: cuda:9 does not exist; this machine has 0 CUDA devices")
    return Station(store=store, device=DEVICE, residents=Residents(1 << 20), run=run)


def fake_child(*args: Any) -> None:
    """`child.main` with fake jobs. Empty packages stand in for those that load torch, so that it is up in no time."""
    planner = types.ModuleType("nimble_jobs.planner")
    planner.Builders = planner.Residents = object  # type: ignore[attr-defined]
    workloads = types.ModuleType("nimble_jobs.workloads")
    workloads.__path__ = [str(Path(child.__file__).parents[1] / "workloads")]
    sys.modules |= {planner.__name__: planner, workloads.__name__: workloads}
    child.main(*args, make_station=make_station)


def die_at_start(*_args: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang_at_start(*_args: Any) -> None:
    time.sleep(600)


def submit(store: Store, folder: Path, *, name: str = "fake", **args: Any) -> Job:
    """Queue a job. `timeout_s`, `retry_s`, `max_attempts` and `stall` are its spec's; what it does is in the rest."""
    timeout_s, retry_s = args.pop("timeout_s", None), args.pop("retry_s", 0.05)
    stall, attempts = args.pop("stall", None), args.pop("max_attempts", 3)
    after, foreground = args.pop("after", ()), args.pop("foreground", False)
    spec = {
        "version": 1,
        "name": name,
        "kind": "score",
        "model": {"source": "torchvision:resnet18", "args": {"note": str(folder / f"{name}.note"), **args}},
        "input": {"source": str(folder / "x.npy"), "format": "npy"},
        "output": {"path": str(folder / name)},
        "run": {"retry": {"max_attempts": attempts, "initial": retry_s, "backoff": "constant"}, "stall": stall},
    }
    return queued(
        store,
        spec=specs.dump(specs.restore(spec)),
        name=name,
        kind="score",
        timeout_s=timeout_s,
        after=after,
        foreground=foreground,
        now=time.time(),
    )


if __name__ == "__main__":
    home, idle, grace, device, target, limit = sys.argv[1:]
    running.OVERTIME_S = 1.0
    running.CANCEL_GRACE_S = 2.0
    trouble.GONE_S = float(os.environ.get("FAKES_GONE_S", trouble.GONE_S))
    post.POLL_S = float(os.environ.get("FAKES_POLL_S", post.POLL_S))
    serve.LAST_TRACES_S = float(os.environ.get("FAKES_LAST_TRACES_S", serve.LAST_TRACES_S))  # type: ignore[attr-defined]
    sys.exit(
        serve.run(
            Path(home),
            devices=device.split(","),
            max_idle_s=float(idle) or None,
            max_time_s=float(limit) or None,
            grace_s=float(grace),
            target={"dies": die_at_start, "hangs": hang_at_start}.get(target, fake_child),
        )
    )
