"""Run scoring jobs through the command line and write down replay against eager, as `show` reports them.

    python scripts/measure_run.py --json FILE [--dtype fp16] [--batch 1] [--records 256] [--phases] [MODEL ...]

Each model (a torchvision name) is scored twice on random images: the first run builds its schedule, the second finds
it. "Outside" is the wall time of the whole second command without its reading, replaying and writing. It finds Python's
modules compiled, by the first one if by nobody else.

With --phases a third run, whose time is a little longer, writes down where that goes (run_phases.py): a table for each
thread, by when a phase began. The main thread's phases add up to the wall time; what other threads did lies beside it.
Seconds count from the start of the process. A phase that is entered several times began first and ended last then.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from measuring import cli, compiled_python, environment, save

MODELS = ("resnet50", "mobilenet_v2", "inception_v3")
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


def measure(model: str, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Two runs of one model: a miss and a stored hit."""
    size = options.size or SIZES.get(model, 224)
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
        rows[-1]["phases"] = phases(folder, folder / f"{model}-second.yaml")
    return rows


def phases(folder: Path, spec: Path, more: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """One more run: phases by thread, with those before Python runs and after the command has ended. Prints them.

    `more` is added to the environment.
    """
    out = folder / "phases.json"
    start = time.time()
    command = [sys.executable, str(PHASES), str(out), "--home", str(folder / "home"), "run", str(spec)]
    subprocess.run(command, check=True, stdout=subprocess.PIPE, env={**os.environ, **more})
    wall_s = time.time() - start
    found = json.loads(out.read_text())
    began_s = found["began"] - start
    main, *others = found["threads"]
    ends_s = found["ended"] - start
    found["threads"][main] |= {
        "start of Python": {"first_s": -began_s, "last_s": 0.0, "wall_s": began_s, "cpu_s": 0.0},
        "end of the process": {
            "first_s": ends_s - began_s,
            "last_s": wall_s - began_s,
            "wall_s": wall_s - ends_s,
            "cpu_s": 0.0,
        },
    }
    print(f"  {wall_s:.2f} s in all, {found['cpu_s']:.2f} s of the CPU, {found['modules']} modules", flush=True)
    for thread in (main, *others):
        rows = sorted(found["threads"][thread].items(), key=lambda item: item[1]["first_s"])
        print(f"  {thread}: {sum(r['wall_s'] for _, r in rows):.2f} s")
        print("    began   ended    took     CPU")
        for name, r in rows:
            if r["wall_s"] >= SHOWN_S:
                began, ended = r["first_s"] + began_s, r["last_s"] + began_s
                print(f"  {began:7.3f} {ended:7.3f} {r['wall_s']:7.3f} {r['cpu_s']:7.3f} s  {name}", flush=True)
    return {"wall_s": wall_s, **found}


def main() -> None:
    """Measure, print a line a run, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--phases", action="store_true", help="where the wall time of a stored run goes")
    parser.add_argument("--dtype", default="fp16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--records", type=int, default=256)
    parser.add_argument("--size", type=int, help="pixels of a side; default: what the model was made for")
    parser.add_argument("--fuse", default="auto", choices=["auto", "off", "max"])
    options = parser.parse_args()
    with compiled_python(), tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        rows = [row for model in options.models for row in measure(model, options, folder)]
        findings = json.loads(cli(folder / "home", "doctor", "--json"))["findings"]
    settings = {name: getattr(options, name) for name in ("dtype", "batch", "records", "fuse")}
    device = next(f["detail"] for f in findings if f["name"] == "device")
    save(options.json, {"environment": environment(device=device, options=settings), "results": rows})


if __name__ == "__main__":
    main()
