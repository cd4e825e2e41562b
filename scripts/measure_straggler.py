"""One job over several processes on the CPU, one of them ten times slower: its time beside the ideal.

    python scripts/measure_straggler.py [--devices 4] [--shards 200] [--batch-ms 20] [--slower 10]

The model sleeps, so the times do not depend on the machine's cores. The ideal is that of all members' rates together.
Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from nimble_jobs import client
from nimble_jobs.job import Job, JobState
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve

BATCH, SHARD = 10, 10
MODEL = """\
import os, pathlib, time

import torch

HERE = pathlib.Path(__file__).parent
try:  # the first process is the slow one
    os.close(os.open(HERE / "slow", os.O_CREAT | os.O_EXCL))
    PAUSE_S = {slow}
except FileExistsError:
    PAUSE_S = {fast}


class Slow(torch.nn.Module):
    def forward(self, x):
        time.sleep(PAUSE_S)
        return x * 2
"""
SPEC = """\
version: 1
name: straggler
kind: score
model: {{source: "python:{folder}/model.py:Slow"}}
input: {{source: {folder}/x.npy, format: npy, batch_size: {batch}}}
schedule: {{on_miss: eager}}
output: {{path: {folder}/out, format: npy, fields: [logits], shard_size: {shard}}}
run: {{gpus: all}}
"""


def main() -> int:
    """Measure one job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--shards", type=int, default=200)
    parser.add_argument("--batch-ms", type=float, default=20.0)
    parser.add_argument("--slower", type=float, default=10.0)
    options = parser.parse_args()
    fast_s = options.batch_ms / 1e3
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.save(folder / "x.npy", np.zeros((options.shards * SHARD, 4), np.float32))
        (folder / "model.py").write_text(MODEL.format(slow=fast_s * options.slower, fast=fast_s))
        spec = folder / "job.yaml"
        spec.write_text(SPEC.format(folder=folder, batch=BATCH, shard=SHARD))
        with open_store(resolve(str(folder / "home"))) as store:
            job = client.submit(spec, store=store, allow_python=[folder])
            done, joined_s = scored(store, job, options.devices, folder)
            members = store.shards.members(job.id)
            copies = sum(event.kind == "copy" for event in store.jobs.events(job.id))
    assert done.state is JobState.SUCCEEDED, done.error
    assert done.finished_at is not None
    took_s = done.finished_at - joined_s
    before = options.shards * SHARD / BATCH  # batches
    ideal_s = before * fast_s / (len(members) - 1 + 1 / options.slower)
    figures = {
        "devices": len(members),
        "shards": options.shards,
        "batch_ms": options.batch_ms,
        "slower": options.slower,
        "took_s": round(took_s, 2),
        "ideal_s": round(ideal_s, 2),
        "ratio": round(took_s / ideal_s, 3),
        "copies": copies,
        "records": [member.records_done for member in members],
    }
    print(json.dumps(figures))
    return 0


def scored(store: Store, job: Job, devices: int, folder: Path) -> tuple[Job, float]:
    """Run a worker until the job has ended; also the moment, in Unix seconds, when the first member began to score."""
    command = [sys.executable, "-P", "-m", "nimble_jobs.worker", "--home", str(store.home)]
    command += ["--devices", ",".join(["cpu"] * devices)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    store.jobs.hold([job.id], time.time())  # until all processes are ready
    with (folder / "log").open("w") as log, subprocess.Popen(command, stderr=log, env=environment) as worker:
        try:
            while sum(info.status == "ready" for info in store.workers.live("worker")) < devices:
                time.sleep(0.1)
            began = time.time()
            store.jobs.release([job.id], began)
            (done,) = client.wait([job.id], store=store, timeout_s=600)
        finally:
            worker.terminate()
    return done, began


if __name__ == "__main__":
    sys.exit(main())
