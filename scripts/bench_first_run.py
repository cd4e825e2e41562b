"""First runs on this machine's device, nothing stored, beside the same jobs with `on_miss: eager`.

    python scripts/bench_first_run.py --json FILE [--records 100,1000,20000,100000] [--model resnet50] [--batch 32]
        [--phases]

Each job is a `run` of its own with an empty state folder and an empty folder for compilers, after one that is not
counted. The input is one .npy of uint8 images, the first thousand of random pixels and the others zeros that take no
space on the disk. A job's time is what `show` says from its start to its end; the command's is given beside it. Takes
three minutes on an H200. With --phases one more first run for each number of records writes down where its time goes.
Exit 1 where a first run takes more than 1.25 times as long as in eager, or, from 20,000 records on, as long or longer.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from measure_run import phases
from measuring import cli, environment, save

MOST, SURE_FROM = 1.25, 20_000
PIXELS = (3, 224, 224)
RANDOM = 1000
SPEC = """\
version: 1
name: {name}
kind: score
model: {{source: "torchvision:{model}", dtype: {dtype}}}
input:
  source: {records}.npy
  format: npy
  batch_size: {batch}
  transform: {{scale: 0.00392156862745098, mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225]}}
output: {{path: out/{name}, format: parquet, fields: [id, top1, probability], if_exists: replace}}
schedule: {{on_miss: {on_miss}}}
"""


def make(path: Path, records: int) -> None:
    """An .npy of uint8 images, most of it a hole."""
    images = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(records, *PIXELS))
    rows = min(records, RANDOM)
    images[:rows] = np.random.default_rng(0).integers(0, 256, (rows, *PIXELS), dtype=np.uint8)
    images.flush()


def caches(home: Path) -> dict[str, str]:
    """Folders of their own for compilers."""
    return {f"{name}_CACHE_DIR": f"{home}-{name.lower()}" for name in ("TORCHINDUCTOR", "TRITON")}


def seconds(iso: str) -> float:
    """Unix seconds of a time as `show` prints it."""
    return dt.datetime.fromisoformat(iso).timestamp()


def write_spec(folder: Path, given: argparse.Namespace, records: int, on_miss: str, name: str) -> Path:
    """The spec of a job."""
    fields = {"name": name, "model": given.model, "dtype": given.dtype, "batch": given.batch}
    path = folder / f"{name}.yaml"
    path.write_text(SPEC.format(**fields, records=records, on_miss=on_miss))
    return path


def run(folder: Path, given: argparse.Namespace, records: int, on_miss: str) -> dict[str, Any]:
    """One job with nothing stored."""
    name = f"{on_miss}-{records}"
    spec = write_spec(folder, given, records, on_miss, name)
    with tempfile.TemporaryDirectory(dir=folder) as state:
        home, start = Path(state) / "home", time.perf_counter()
        cli(home, "run", str(spec), "--quiet", env=caches(home))
        wall_s = time.perf_counter() - start
        job = json.loads(cli(home, "show", name, "--json"))
    return {
        "records": records,
        "on_miss": on_miss,
        "job_s": seconds(job["finished_at"]) - seconds(job["started_at"]),
        "wall_s": wall_s,
        "timings": job["timings"],
        "schedule": job["schedule"],
        "decided": next((e["data"] for e in job["events"] if "plan" in (e.get("data") or {})), None),
        "events": [e["message"] for e in job["events"] if e["kind"] in ("schedule", "fallback")],
    }


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--records", default="100,1000,20000,100000")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--dtype", default="fp16")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--phases", action="store_true")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    bad = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        counts = [int(text) for text in given.records.split(",")]
        for records in counts:
            make(folder / f"{records}.npy", records)
        run(folder, given, counts[0], "eager")  # the disk has its files in memory now
        (folder / "out" / f"eager-{counts[0]}").rename(folder / "warm")
        print("| records | in eager | first run | over it | plan | what it said |\n|---|---|---|---|---|---|")
        for records in counts:
            eager, first = (run(folder, given, records, on_miss) for on_miss in ("eager", "build"))
            rows += [eager, first]
            over = first["job_s"] / eager["job_s"]
            bad |= over > MOST or (records >= SURE_FROM and over >= 1.0)
            plan = (first["schedule"].get("first_run") or {}).get("plan")
            said = "; ".join(first["events"][1:])
            print(f"| {records:,} | {eager['job_s']:.2f} s | {first['job_s']:.2f} s | {over:.2f} | {plan} | {said} |")
            sys.stdout.flush()
        for records in counts if given.phases else ():
            print(f"\n{records:,} records, one more first run:", flush=True)
            spec = write_spec(folder, given, records, "build", f"phases-{records}")
            with tempfile.TemporaryDirectory(dir=folder) as state:
                found = phases(Path(state), spec, caches(Path(state) / "home"))
            rows.append({"records": records, "on_miss": "build", "phases": found})
        findings = json.loads(cli(folder / "facts", "doctor", "--json"))["findings"]
    device = next(f["detail"] for f in findings if f["name"] == "device")
    settings = {"model": given.model, "dtype": given.dtype, "batch": given.batch}
    save(given.json, {"environment": environment(device=device, options=settings), "results": rows})
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
