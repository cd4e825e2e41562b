"""The end of the quick start: a table of its jobs, its accuracy, and pictures to look at.

Figures come from `show --json` and from the Parquet files that the jobs published.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from nimble_jobs.errors import NotFound
from nimble_jobs.store import open_store
from nimble_jobs.store.home import resolve

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


def relative(path: str | Path) -> str:
    """The path as it reads from here."""
    return os.path.relpath(path, Path.cwd())


def pictures(train: dict[str, Any], scored: dict[str, Any], wrong: list[dict[str, Any]]) -> list[tuple[Path, str]]:
    """Draw what can be looked at; each picture with what it shows."""
    curves, out = Path(train["outputs"]["path"]) / "curves.png", Path(scored["outputs"]["path"])
    found = [(curves, "loss and accuracy of the training")] if curves.exists() else []
    if find_spec("matplotlib") is None:  # packages that were there already, by OFFLINE=1
        print("left out, since matplotlib is missing; it comes with nimble-jobs[plots]")
        return found
    import quickstart_pictures

    path = out.with_name(f"{out.name}-wrong.png")
    path.unlink(missing_ok=True)  # of an earlier run
    if wrong:
        with np.load(scored["spec"]["input"]["source"]) as file:
            images = dict(zip(file["ids"].tolist(), file["images"], strict=True))
        quickstart_pictures.sheet(wrong, images, path)
        found.append((path, f"the {len(wrong)} scans that were read wrongly"))
    path = out.with_name(f"{out.name}-timeline.png")
    with open_store(resolve()) as store, suppress(NotFound):  # a job that stayed in eager has no schedule
        schedule = store.schedules.verified(scored["schedule"]["key"]).load()
        quickstart_pictures.timeline(schedule, f"one replay of {scored['name']}", path)
        found.append((path, "when each task of a replay runs"))
    return found


def main(train_id: str, score_id: str, photos_id: str) -> int:
    """Print the table, draw and name the pictures; 1 when the model did not learn."""
    jobs = [show(job_id) for job_id in (train_id, score_id, photos_id)]
    train, scored, photos = jobs
    files = sorted(Path(scored["outputs"]["path"]).glob("*.parquet"))
    rows = pq.read_table(files, columns=["id", "label", "top1", "probability"]).to_pylist()
    wrong = [row for row in rows if row["label"] != row["top1"]]
    accuracy = 1 - len(wrong) / len(rows)

    head = ("job", "records", "records/s", "schedule", "replay", "eager", "speed-up")
    print(table([head, *(row(job) for job in jobs)]))
    print()
    print(
        f"accuracy   {accuracy:.1%}: {len(rows) - len(wrong)} of {len(rows)} held-out "
        f"scans (expected: at least {ACCURACY:.0%})"
    )
    for job in jobs:
        print(f"{job['name']:<14} {relative(job['outputs']['path'])}")
    print(f"measured on {scored['schedule'].get('device', 'this machine')}; replay and eager: time of one batch")
    hits = [job["schedule"]["hit"] for job in (scored, photos)]
    if "miss" in hits:
        print("the schedules were built and stored; run scripts/quickstart again, and the jobs load them")
    else:
        print("both scoring jobs loaded their schedules from the store and built nothing")
    print("\npictures")
    named = [(relative(path), what) for path, what in pictures(train, scored, wrong)]
    for path, what in named:
        print(f"{path:<{max(len(p) for p, _ in named)}}  {what}")
    if accuracy < ACCURACY:
        print(f"the accuracy is below {ACCURACY:.0%}: something is wrong", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
