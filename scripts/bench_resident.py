#!/usr/bin/env python3
"""Compare a job that finds its graph resident in a worker with a fresh process that scores the same file in eager.

    python scripts/bench_resident.py [--jobs 200] [--device cuda] [--dtype fp16] [--phases] [--home DIR] [--json FILE]

Small scoring jobs over four torchvision models go to one worker. Checked: all succeed, each model is built once, all
other jobs are resident hits. Exits with 1 when a check fails or a resident job is less than 20 times faster.

With --phases the worker writes down where the time goes (resident_phases.py): medians of the resident jobs, and how
many commits, statements, syncs and opened files each takes. "Beyond the device" is a job's time from its claim to its
recorded end without its replays, as measured when the schedule was built. --home puts state and outputs elsewhere, on
/dev/shm for instance: what a disk costs is the difference.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import resident_phases
from measuring import cli, environment, save

from nimble_jobs import client
from nimble_jobs.job import Job, JobState
from nimble_jobs.store import open_store
from nimble_jobs.store.home import resolve

MODELS = ("resnet18", "squeezenet1_1", "mobilenet_v3_small", "shufflenet_v2_x0_5")
RECORDS = 32
TIMES_LESS = 20.0
SPEC = """\
version: 1
name: {model}-{number}
kind: score
model: {{source: "torchvision:{model}", dtype: {dtype}}}
input: {{source: records.npz, format: npz, fields: {{x: x}}, batch_size: {records}}}
schedule: {{progressive: false, fuse: "{fuse}"}}
output: {{path: out/{model}-{number}, format: npy, fields: [id, top1, probability]}}
"""
EAGER = """\
import sys
import numpy as np
import torch
import torchvision

source, model, device, out = sys.argv[1:]
torch.manual_seed(0)
module = torchvision.models.get_model(model).eval().to(device)
with np.load(source) as file, torch.no_grad():
    probability, top1 = module(torch.from_numpy(file["x"]).to(device)).softmax(1).max(1)
np.save(out + ".probability.npy", probability.cpu().numpy())
np.save(out + ".top1.npy", top1.cpu().numpy())
"""


def main() -> int:
    """Measure, check, print, write; 0 when every check holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, default=200, help="how many jobs in all (%(default)s)")
    parser.add_argument("--fresh", type=int, default=5, help="fresh processes for each model (%(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument("--dtype", default="fp32", help="fp32, fp16 or bf16 (%(default)s)")
    parser.add_argument(
        "--fuse", choices=("auto", "off", "max"), default="auto", help="off builds in seconds (%(default)s)"
    )
    parser.add_argument("--phases", action="store_true", help="where the time of a resident job goes")
    parser.add_argument("--home", type=Path, help="where state folder and outputs are made (a temporary folder)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # for both sides: threads that spin disturb other processes
    with tempfile.TemporaryDirectory(prefix="nimble-jobs-", dir=options.home) as temporary:
        folder = Path(temporary)
        # A fresh process must find torch compiled to bytecode, also where its folder has none.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
        x = np.random.default_rng(0).standard_normal((RECORDS, 3, 32, 32), dtype=np.float32)
        np.savez(folder / "records.npz", x=x)
        fresh = {model: fresh_s(folder, model, options.device, options.fresh) for model in MODELS}
        done, cache, wall_s = score(folder, options)
        checks = check(folder, done, cache, compared=options.dtype == "fp32")
        phases = None
        if options.phases:
            resident = [job.id for job in in_turn(done) if job.schedule["hit"] == "resident"]
            phases = resident_phases.summary(folder / "phases.jsonl", resident)
    rows = compare(done, fresh)
    checks[f"every model at least {TIMES_LESS:g} times faster"] = all(r["times_less"] >= TIMES_LESS for r in rows)
    report(rows, checks, len(done), wall_s)
    if phases is not None:
        report_phases(phases)
    settings = {name: getattr(options, name) for name in ("jobs", "fresh", "device", "dtype", "fuse")}
    figures: dict[str, Any] = {
        "environment": environment(device=options.device, OMP_WAIT_POLICY=os.environ["OMP_WAIT_POLICY"]),
        "options": {**settings, "records": RECORDS},
        "jobs": {"hits": Counter(j.schedule["hit"] for j in done), "wall_s": round(wall_s, 3)},
        "checks": checks,
        "results": rows,
        **({"phases": phases} if phases is not None else {}),
    }
    save(options.json, figures)
    return 0 if all(checks.values()) else 1


def fresh_s(folder: Path, model: str, device: str, runs: int) -> list[float]:
    """Wall times of fresh processes. One more goes first: those that count find files in memory, and bytecode."""
    times = []
    for _ in range(runs + 1):
        command = [sys.executable, "-c", EAGER, str(folder / "records.npz"), model, device, str(folder / model)]
        start = time.perf_counter()
        subprocess.run(command, check=True)
        times.append(time.perf_counter() - start)
    print(f"fresh processes, {model}: {', '.join(f'{t:.2f}' for t in times[1:])} s", flush=True)
    return times[1:]


def score(folder: Path, options: argparse.Namespace) -> tuple[list[Job], list[dict[str, Any]], float]:
    """Give the jobs, the models taking turns, to one worker. Returns their records, what `cache ls --json` says
    while the worker lives, and the seconds from the first start to the last end.
    """
    with open_store(resolve(str(folder / "home"))) as store:
        jobs = []
        for number in range(options.jobs):
            model = MODELS[number % len(MODELS)]
            path = folder / f"{model}-{number}.yaml"
            path.write_text(
                SPEC.format(model=model, number=number, records=RECORDS, dtype=options.dtype, fuse=options.fuse)
            )
            jobs.append(client.submit(path, store=store))
        print(f"{len(jobs)} jobs submitted", flush=True)
        worker = None
        if options.phases:
            own = Path(resident_phases.__file__)
            words = [sys.executable, str(own), str(store.home), options.device, str(folder / "phases.jsonl")]
            worker = subprocess.Popen([*words, "--max-idle-s", "60"])
        else:
            client.start_worker(store=store, device=options.device)
        try:
            done = client.wait([job.id for job in jobs], store=store, timeout_s=1800, poll_s=1.0)
            cache = json.loads(cli(store.home, "cache", "ls", "--json"))
        finally:
            client.stop_workers(store=store)
            if worker is not None:
                worker.wait()
    return done, cache, max(j.finished_at or 0 for j in done) - min(j.started_at or 0 for j in done)


def check(folder: Path, done: list[Job], cache: list[dict[str, Any]], *, compared: bool) -> dict[str, bool]:
    """What must be true of the jobs, apart from their speed."""
    hits = Counter(job.schedule.get("hit") for job in done)
    by_model = Counter(job.name.rpartition("-")[0] for job in done if job.schedule.get("hit") == "miss")
    return {
        "all succeeded": all(job.state is JobState.SUCCEEDED for job in done),
        "each model was built once": by_model == Counter(MODELS),
        "all others are resident hits": hits == {"miss": len(MODELS), "resident": len(done) - len(MODELS)},
        "the cache lists each model, resident": len(cache) == len(MODELS) and all(row["resident"] for row in cache),
        **({"outputs are those of the fresh processes": all(same(folder, job) for job in done)} if compared else {}),
    }


def same(folder: Path, job: Job) -> bool:
    """Whether a job's probabilities are those that the fresh process of its model wrote."""
    ours = np.load(folder / "out" / job.name / "part-00000.probability.npy")
    theirs = np.load(folder / f"{job.name.rpartition('-')[0]}.probability.npy")
    return bool(np.allclose(ours, theirs, rtol=1e-3, atol=1e-7))


def in_turn(done: Iterable[Job]) -> list[Job]:
    """The jobs in the order in which they ended."""
    return sorted(done, key=lambda job: job.finished_at or 0)


def compare(done: list[Job], fresh: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Medians of a model's resident hits and of its fresh processes.

    A job counts from its claim to its recorded end, and also from the end of the job before it to its own.
    """
    ordered = in_turn(done)
    between = {b.id: (b.finished_at or 0) - (a.finished_at or 0) for a, b in itertools.pairwise(ordered)}
    rows = []
    for model, times in fresh.items():
        own = [j for j in done if j.name.rpartition("-")[0] == model and j.schedule.get("hit") == "resident"]
        resident_s = statistics.median((j.finished_at or 0) - (j.started_at or 0) for j in own)
        fresh_s = statistics.median(times)
        rows.append(
            {
                "model": model,
                "resident_jobs": len(own),
                "resident_s": round(resident_s, 4),
                "between_ends_s": round(statistics.median(between[j.id] for j in own), 4),
                "beyond_device_s": round(
                    statistics.median((j.finished_at or 0) - (j.started_at or 0) - device_s(j) for j in own), 4
                ),
                "run_s": round(statistics.median(j.timings["run_s"] for j in own), 4),
                "fresh_eager_s": round(fresh_s, 3),
                "times_less": round(fresh_s / statistics.median(between[j.id] for j in own), 1),
            }
        )
    return rows


def device_s(job: Job) -> float:
    """Seconds that the device needs for the one batch of a job, as measured when its schedule was built."""
    return float(job.schedule.get("replay_us") or 0.0) / 1e6


def report_phases(phases: dict[str, dict[str, float]]) -> None:
    """Medians of the resident jobs, the longest phase first."""
    for name, ms in sorted(phases["ms"].items(), key=lambda item: -item[1]):
        print(f"{ms:9.2f} ms  {name}")
    print(", ".join(f"{count:g} {name}" for name, count in phases["counts"].items()), "a job")


def report(rows: list[dict[str, Any]], checks: dict[str, bool], count: int, wall_s: float) -> None:
    """The table and the checks, for people."""
    heads = ("resident", "beyond device", "between ends", "fresh eager", "times less")
    print(f"{'model':20} {'jobs':>4} {heads[0]:>10} {heads[1]:>13} {heads[2]:>12} {heads[3]:>12} {heads[4]:>10}")
    for r in rows:
        resident_ms, beyond_ms, between_ms, fresh_ms = (
            r[name] * 1e3 for name in ("resident_s", "beyond_device_s", "between_ends_s", "fresh_eager_s")
        )
        times = f"{resident_ms:7.1f} ms {beyond_ms:10.1f} ms {between_ms:9.1f} ms {fresh_ms:9.0f} ms"
        print(f"{r['model']:20} {r['resident_jobs']:4} {times} {r['times_less']:10.1f}")
    print(f"{count} jobs in {wall_s:.1f} s, builds included")
    for name, holds in checks.items():
        print(f"{'ok' if holds else 'FAILED':6} {name}")


if __name__ == "__main__":
    sys.exit(main())
