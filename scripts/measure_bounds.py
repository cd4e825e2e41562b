"""How far each network's chosen schedule is from what no replay can beat: the critical path and the total work.

    python scripts/measure_bounds.py [MODEL ...] --dtype fp16 --batch 1 --fuse auto --json FILE --table FILE.md

Both bounds are of task times measured alone, which is not quite how tasks run: a task alone has all caches and all of
the memory's bandwidth for itself, and is at least as long as the device takes to start it. Each schedule is searched in
a process of its own. Models are those of the benchmark, or torchvision:NAME[@SIDE].
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nimble_jobs.bench.request import CONTIGUOUS, DTYPES, models_of
from nimble_jobs.bench.zoo import ZOO

COLUMNS = (
    "model",
    "dtype",
    "batch",
    "replay",
    "critical path",
    "replay / critical path",
    "total work",
    "replay / total work",
    "tasks",
    "width",
    "streams",
    "syncs needed, used",
    "peak memory",
    "chosen",
)


def measure(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """One row, searched and measured in this process. Raises what the search does."""
    import torch  # here, so that whoever only starts these processes need not wait for it

    from nimble_jobs.bench.cell import Cell, model_of
    from nimble_jobs.bench.environment import environment, prepare_precision
    from nimble_jobs.engine import device as devices
    from nimble_jobs.planner.forward.build import build_best
    from nimble_jobs.planner.keys.options import BuildOptions

    prepare_precision()
    device = devices.resolve(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    cell = Cell(model, model_of(model), options.dtype, options.batch, device, None)
    built = build_best(
        cell.own_module(),
        cell.inputs(CONTIGUOUS)[0],
        "bounds",
        BuildOptions(fuse=options.fuse, tolerance=cell.tolerance, budget_s=options.budget, eager="reference"),
        device,
    )
    schedule = built.schedule
    path, work = schedule.facts.critical_path_us, schedule.facts.total_work_us
    row = {
        "model": model,
        "dtype": options.dtype,
        "batch": options.batch,
        "failure": built.failure,
        "replay_us": schedule.replay_us,
        "over_critical_path": schedule.replay_us / path if path else None,
        "over_total_work": schedule.replay_us / work if work else None,
        **asdict(schedule.facts),
        "peak_bytes": schedule.peak_bytes,
        "eager_us": schedule.eager_us,
        "build_s": schedule.build_s,
        "chosen": next((c.name for c in schedule.candidates if c.chosen), None),
        "candidates": [asdict(c) for c in schedule.candidates],
        "environment": environment(device),
    }
    built.close()
    return row


def in_own_process(model: str, words: list[str]) -> dict[str, Any]:
    """The row, or one that says how its process ended."""
    done = subprocess.run([sys.executable, __file__, *words, "--row", model], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return {"model": model, "failure": f"ended with status {done.returncode}; its last words are above"}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown, times in microseconds."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        cells = [row["model"], *_cells(row)] if row["failure"] is None else [row["model"], row["failure"]]
        lines.append("| " + " | ".join(cells + [""] * (len(COLUMNS) - len(cells))) + " |")
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any]) -> list[str]:
    width = f"{row['width']}" if row["width_exact"] else f"at most {row['width']}"
    return [
        row["dtype"],
        str(row["batch"]),
        f"{row['replay_us']:.0f} µs",
        _us(row["critical_path_us"]),
        _ratio(row["over_critical_path"]),
        _us(row["total_work_us"]),
        _ratio(row["over_total_work"]),
        str(row["tasks"]),
        width,
        str(row["streams"]),
        f"{row['syncs_needed']}, {row['syncs_used']}",
        f"{row['peak_bytes'] / 2**20:.1f} MiB",
        row["chosen"],
    ]


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} µs"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def main() -> None:
    """Measure, print the table, write it and the JSON; status 1 where a model has no row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="*", default=list(ZOO))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="fp16", choices=DTYPES)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--fuse", default="auto", choices=["auto", "off", "max"])
    parser.add_argument("--budget", type=float, default=600.0, help="seconds for one search")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--table", type=Path, metavar="FILE.md")
    parser.add_argument("--row", help=argparse.SUPPRESS)  # measure this one here, and print it as JSON
    options = parser.parse_args()
    if options.row:
        json.dump(measure(options.row, options), sys.stdout)
        return
    models = models_of(",".join(options.models))
    shared = ["--device", options.device, "--dtype", options.dtype, "--batch", str(options.batch)]
    shared += ["--fuse", options.fuse, "--budget", str(options.budget)]
    rows, found = [], None
    for model in models:
        row = in_own_process(model, shared)
        found = row.pop("environment", found)
        rows.append(row)
        print(table([row]).splitlines()[-1], flush=True)
        if options.json is not None:  # after each model: a later one may take the machine down
            options.json.write_text(json.dumps({"environment": found, "results": rows}, indent=1) + "\n")
        if options.table is not None:
            options.table.write_text(table(rows))
    sys.exit(any(row["failure"] is not None for row in rows))


if __name__ == "__main__":
    main()
