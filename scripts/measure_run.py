"""Run scoring jobs through the command line and write down replay against eager, as `show` reports them.

    python scripts/measure_run.py --json FILE [--dtype fp16] [--batch 1] [--records 256] [--phases] [MODEL ...]

Each model (a torchvision name) is scored twice on random images: the first run builds its schedule, the second finds
it. "Outside" is the wall time of the whole second command without its reading, replaying and writing.

With --phases a third run, whose time is a little longer, writes down where that goes (run_phases.py).
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

MODELS = ("resnet50", "mobilenet_v2", "inception_v3")
FACTS = ("device", "nimble-jobs", "python", "torch", "torchvision", "triton", "numpy", "sqlite")
SHOWN_S = 0.005
SIZES = {"inception_v3": 299}
SPEC = """\
version: 1
name: {name}
kind: score
model: {{source: "torchvision:{model}", dtype: {dtype}}}
input: {{source: {model}.npy, format: npy, batch_size: {batch}}}
output: {{path: out/{name}, format: parquet, fields: [top1, probability], if_exists: replace}}
schedule: {{fuse: {fuse}, progressive: false}}
"""


PHASES = Path(__file__).with_name("run_phases.py")


def cli(home: Path, *words: str) -> str:
    """Standard output of one nimble-jobs command. Raises CalledProcessError where it fails."""
    command = [sys.executable, "-m", "nimble_jobs.cli.main", "--home", str(home), *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def measure(model: str, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Two runs of one model: a miss and a stored hit."""
    size = SIZES.get(model, 224)
    data = np.random.default_rng(0).standard_normal((options.records, 3, size, size), dtype=np.float32)
    np.save(folder / f"{model}.npy", data)
    rows = []
    for turn in ("first", "second"):
        name = f"{model}-{turn}"
        fields = {"name": name, "model": model, "dtype": options.dtype, "batch": options.batch, "fuse": options.fuse}
        (folder / f"{name}.yaml").write_text(SPEC.format(**fields))
        start = time.perf_counter()
        cli(folder / "home", "run", str(folder / f"{name}.yaml"))
        wall_s = time.perf_counter() - start
        job = json.loads(cli(folder / "home", "show", name, "--json"))
        outside_s = wall_s - job["timings"]["run_s"]
        rows.append(
            {
                "model": model,
                "schedule": job["schedule"],
                "timings": job["timings"],
                "wall_s": round(wall_s, 3),
                "outside_s": round(outside_s, 3),
            }
        )
        found, timings = job["schedule"], job["timings"]
        print(
            f"{model:14} {found['hit']:8} replay {found['replay_us']:8.0f} us  eager {found['eager_us']:8.0f} us  "
            f"{found['eager_us'] / found['replay_us']:5.2f}x  streams {found['streams']:2}  "
            f"in flight {found['in_flight']}  error {found['error']:.1e}  {timings['records_per_s']:8.0f} records/s  "
            f"build {timings['build_s']:.1f} s  outside {outside_s:.2f} of {wall_s:.2f} s",
            flush=True,
        )
    if options.phases:
        rows[-1]["phases_s"] = phases(folder, folder / f"{model}-second.yaml")
    return rows


def phases(folder: Path, spec: Path) -> dict[str, dict[str, float]]:
    """Seconds by thread and phase of one more run, and those before Python runs and after the command has ended."""
    out = folder / "phases.json"
    start = time.time()
    command = [sys.executable, str(PHASES), str(out), "--home", str(folder / "home"), "run", str(spec)]
    subprocess.run(command, check=True, stdout=subprocess.PIPE)
    end = time.time()
    found = json.loads(out.read_text())
    process = {"start of Python": found["began"] - start, "end of the process": end - found["ended"]}
    threads = {"process": process, **found["threads"]}
    for thread, seconds in threads.items():
        print(f"  {thread}: {sum(seconds.values()):.2f} s", flush=True)
        for name, s in sorted(seconds.items(), key=lambda item: -item[1]):
            if s >= SHOWN_S:
                print(f"    {s:7.3f} s  {name}", flush=True)
    return {thread: {name: round(s, 4) for name, s in seconds.items()} for thread, seconds in threads.items()}


def main() -> None:
    """Measure, print a line a run, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--phases", action="store_true", help="where the wall time of a stored run goes")
    parser.add_argument("--dtype", default="fp16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--records", type=int, default=256)
    parser.add_argument("--fuse", default="auto", choices=["auto", "off", "max"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        rows = [row for model in options.models for row in measure(model, options, folder)]
        found = json.loads(cli(folder / "home", "doctor", "--json"))["findings"]
    environment = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        **{f["name"]: f["detail"] for f in found if f["name"] in FACTS},
        "options": {"dtype": options.dtype, "batch": options.batch, "records": options.records, "fuse": options.fuse},
    }
    if options.json is not None:
        options.json.write_text(json.dumps({"environment": environment, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
