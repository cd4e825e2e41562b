"""The table at the end of the quick start, from `show --json` of its jobs and the Parquet files that they published."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

ACCURACY = 0.98  # wanted of the held-out scans
HIT = {"miss": "built now", "stored": "stored hit", "resident": "resident hit"}


def show(job_id: str) -> dict[str, Any]:
    """What the store knows of a job."""
    command = [sys.executable, "-m", "nimble_jobs.cli.main", "show", job_id, "--json"]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def row(job: dict[str, Any]) -> tuple[str, ...]:
    """One job as cells."""
    schedule, timings = job["schedule"], job["timings"]
    replay_us, eager_us = schedule.get("replay_us"), schedule.get("eager_us")
    measured = ("-", "-", "-")
    if replay_us and eager_us:
        measured = (f"{replay_us / 1e3:.2f} ms", f"{eager_us / 1e3:.2f} ms", f"{eager_us / replay_us:.2f}x")
    state = "eager" if schedule.get("fallback") else HIT[schedule["hit"]]
    if schedule.get("eager_is_faster"):
        state += ", eager is faster here"
    return (job["name"], f"{job['records_done']:,}", f"{timings['records_per_s']:,.0f}", state, *measured)


def table(rows: list[tuple[str, ...]]) -> str:
    """Columns side by side; numbers to the right."""
    widths = [max(len(cells[i]) for cells in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in (0, 3) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in rows
    )


def main(train_id: str, score_id: str, photos_id: str) -> int:
    """Print the table; 1 when the model did not learn."""
    jobs = [show(job_id) for job_id in (train_id, score_id, photos_id)]
    scored, photos = jobs[1:]
    files = sorted(Path(scored["outputs"]["path"]).glob("*.parquet"))
    found = pq.read_table(files, columns=["label", "top1"])
    right = pc.sum(pc.equal(found["label"], found["top1"])).as_py()
    accuracy = right / found.num_rows

    head = ("job", "records", "records/s", "schedule", "replay", "eager", "speed-up")
    print(table([head, *(row(job) for job in jobs)]))
    print()
    print(f"accuracy   {accuracy:.1%}: {right} of {found.num_rows} held-out scans (wanted: {ACCURACY:.0%})")
    for job in jobs:
        print(f"{job['name']:<14} {os.path.relpath(job['outputs']['path'], Path.cwd())}")
    print(f"measured on {scored['schedule'].get('device', 'this machine')}; a replay is one batch")
    hits = [job["schedule"]["hit"] for job in (scored, photos)]
    if "miss" in hits:
        print("schedules were built and stored; run scripts/quickstart again to see them found")
    else:
        print("both schedules were found in the store: nothing was built again")
    if accuracy < ACCURACY:
        print(f"the accuracy is below {ACCURACY:.0%}: something is wrong", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
