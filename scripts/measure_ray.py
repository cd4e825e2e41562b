"""How long workers on a Ray cluster take until N of them are at work, beside pools of actors of Ray Data.

    python scripts/measure_ray.py [--actors 1 2 4] [--rounds 3] [--json FILE]

All run one model that sleeps for a fifth of a second a batch, so that nobody is held up by the cores but while
processes start. Each system has a cluster of one node to itself, on this machine, with the CPUs that it needs. An actor
is at work once it has finished its first batch (or shard, of one batch). Times are of the clock of this machine, from
the start of the command or of the pipeline; both include connecting to the cluster and importing torch in each actor.
Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import measuring
import numpy as np
import psutil

from nimble_jobs import client
from nimble_jobs.store import open_store
from nimble_jobs.store.home import resolve

BATCH_S, LIMIT_S = 0.2, 180.0
SYSTEMS = ("workers", "scorer", "fixed", "growing")
TITLES = {
    "workers": "`worker start --ray`",
    "scorer": "Ray Data, `NimbleScorer`, `concurrency=N`",
    "fixed": "Ray Data, plain class, `concurrency=N`",
    "growing": "Ray Data, plain class, `concurrency=(1, N)`",
}
MODEL = f"""\
import time

import torch


class Slow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(3.0))

    def forward(self, x):
        time.sleep({BATCH_S})
        return x * self.scale
"""
SPEC = """\
version: 1
name: ramp
kind: score
model: {{source: "python:{folder}/model.py:Slow"}}
input: {{source: {folder}/x.npy, format: npy, batch_size: 8}}
schedule: {{on_miss: eager}}
output: {{path: {folder}/out, format: npy, fields: [logits], shard_size: 8}}
run: {{gpus: all}}
"""
POOL = """\
import os
import sys
import time
from pathlib import Path

import numpy as np
import ray

sys.path.insert(0, os.getcwd())
import model

system, address, folder, count = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])


def note():
    path = folder / f"at-{os.getpid()}"
    if not path.exists():
        path.write_text(str(time.time()))


class Plain:
    def __init__(self, make):
        import torch

        self.torch, self.module = torch, make().eval()

    def __call__(self, batch):
        with self.torch.no_grad():
            made = self.module(self.torch.ones(len(batch["id"]), 4)).numpy()
        note()
        return {"output": made}


class Scorer:
    def __init__(self, **given):
        from nimble_jobs.ray import NimbleScorer

        self.scorer = NimbleScorer(**given)

    def __call__(self, batch):
        made = self.scorer({"x": np.ones((len(batch["id"]), 4), np.float32)})
        note()
        return made


ray.init(address=address, log_to_driver=False, logging_level="error")
ray.data.DataContext.get_current().enable_progress_bars = False
ray.cloudpickle.register_pickle_by_value(model)
data = ray.data.range(32_000, override_num_blocks=40)
pool = (1, count) if system == "growing" else count
if system == "scorer":
    given = {"model": model.Slow, "inputs": "x", "batch_size": 8, "device": "cpu", "home": str(folder / "home")}
    data = data.map_batches(Scorer, fn_constructor_kwargs=given, batch_size=8, concurrency=pool, num_cpus=1)
else:
    data = data.map_batches(Plain, fn_constructor_args=[model.Slow], batch_size=8, concurrency=pool, num_cpus=1)
for _ in data.iter_batches(batch_size=8):
    pass
"""


@contextmanager
def cluster(cpus: int) -> Iterator[str]:
    """The address of a cluster that lives as long as the context."""
    folder = tempfile.mkdtemp(prefix="ray-")
    out = Path(folder) / "out"
    words = ["start", "--head", "--block", "--port=0", f"--num-cpus={cpus}", "--num-gpus=0", "--disable-usage-stats"]
    more = ["--include-dashboard=false", "--object-store-memory=200000000", f"--temp-dir={folder}"]
    with out.open("wb") as file:
        head = subprocess.Popen([Path(sys.executable).with_name("ray"), *words, *more], stdout=file, stderr=file)
    try:
        while not (found := re.search(r"ray start --address='([^']+)'", out.read_text())):
            time.sleep(0.1)
            assert head.poll() is None, out.read_text()
        time.sleep(5.0)  # its processes have started
        yield found[1]
    finally:
        for process in [*psutil.Process(head.pid).children(recursive=True), psutil.Process(head.pid)]:
            process.kill()
        head.wait()
        shutil.rmtree(folder, ignore_errors=True)


def by_workers(folder: Path, address: str, count: int) -> list[float]:
    """Seconds until the first, second... worker has finished a shard."""
    np.save(folder / "x.npy", np.ones((8 * 4000, 4), np.float32))
    (folder / "job.yaml").write_text(SPEC.format(folder=folder))
    at: dict[str, float] = {}
    with open_store(resolve(str(folder / "home"))) as store:
        job = client.submit(folder / "job.yaml", store=store, allow_python=[folder])
        command = [str(Path(sys.executable).with_name("nimble-jobs")), "--home", str(store.home), "worker", "start"]
        command += ["--ray", address, "--devices", ",".join(["cpu"] * count)]
        began = time.time()
        with (folder / "log").open("w") as log, subprocess.Popen(command, stderr=log) as process:
            while len(at) < count and time.time() - began < LIMIT_S:
                members = store.shards.members(job.id)
                done = {m.worker for m in members if m.records_done}
                if count == 1 and (store.jobs.get(job.id).records_done or 0) > 0:
                    done = {"alone"}
                for worker in done - at.keys():
                    at[worker] = time.time() - began
                time.sleep(0.05)
            process.terminate()
    return sorted(at.values())


def by_pool(system: str, folder: Path, address: str, count: int) -> list[float]:
    """Seconds until the first, second... actor of a pool of Ray Data has finished a batch."""
    (folder / "pool.py").write_text(POOL)
    began = time.time()
    command = [sys.executable, "pool.py", system, address, str(folder), str(count)]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=environment)
    try:
        while len(seen := list(folder.glob("at-*"))) < count and time.time() - began < LIMIT_S:
            assert process.poll() is None, (folder / "log").read_text()
            time.sleep(0.05)
        time.sleep(0.1)
        return sorted(float(path.read_text()) - began for path in seen)
    finally:
        process.kill()
        process.wait()


def once(system: str, count: int) -> list[float]:
    """One measurement. The schedule of the scorer is stored before."""
    with tempfile.TemporaryDirectory() as name, cluster(count + 1) as address:
        folder = Path(name)
        (folder / "model.py").write_text(MODEL)
        if system == "workers":
            return by_workers(folder, address, count)
        if system == "scorer":
            by_pool(system, folder, address, 1)
            for path in folder.glob("at-*"):
                path.unlink()
        return by_pool(system, folder, address, count)


def main() -> int:
    """Measure all, in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--actors", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    made: dict[str, dict[int, list[list[float]]]] = {system: {n: [] for n in options.actors} for system in SYSTEMS}
    loads: list[float] = []  # of everything that runs here, before each measurement
    for _ in range(options.rounds):
        for count in options.actors:
            for system in SYSTEMS:
                loads.append(round(os.getloadavg()[0], 1))
                times = once(system, count)
                made[system][count].append(times)
                said = f"{system} {count} load {loads[-1]}: {[round(each, 1) for each in times]}"
                print(said, file=sys.stderr, flush=True)
    print("| until N actors are at work, s | " + " | ".join(f"N = {n}" for n in options.actors) + " |")
    print("|---|" + "---|" * len(options.actors))
    for system in SYSTEMS:
        cells = [_cell(count, made[system][count]) for count in options.actors]
        print(f"| {TITLES[system]} | " + " | ".join(cells) + " |")
    environment = measuring.environment(ray=importlib.metadata.version("ray"))
    print(f"\nLoad before the measurements: {min(loads)} to {max(loads)}.")
    print(f"{measuring.in_words(environment)} Ray {environment['ray']}.")
    measuring.save(options.json, {"environment": environment, "seconds": made, "loads": loads})
    return 0


def _cell(count: int, rounds: list[list[float]]) -> str:
    """Median and range of the rounds in which all got to work."""
    whole = sorted(times[-1] for times in rounds if len(times) == count)
    if len(whole) < len(rounds):
        most = max(len(times) for times in rounds)
        return f"not within {LIMIT_S:.0f} in {len(rounds) - len(whole)} of {len(rounds)} (at most {most})"
    return f"{statistics.median(whole):.1f} ({whole[0]:.1f} to {whole[-1]:.1f})"


if __name__ == "__main__":
    sys.exit(main())
