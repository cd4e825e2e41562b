"""What a first run takes over the same job with `on_miss: eager`, by the costs that were measured on an H200.

The job decides with what it knows, the defaults where nothing else is. What then happens is what was measured; builds,
and captures that were not measured, take as many times as long as `--build` says. Prints a table; exit 1 where a job
takes more than 1.25 times as long, or, from 20,000 records on, as long or longer.

    python scripts/simulate_first_runs.py [--build 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nimble_jobs.payback import Costs, Plan, Situation, beside, decide, move_pays
from nimble_jobs.planner.jobs.first_run import expected

RECORDS = (100, 1_000, 5_000, 20_000, 50_000, 100_000, 300_000, 1_000_000)
MOST, SURE_FROM = 1.25, 20_000
LESS = 1 - 1e-6  # doing nothing is no less, however its seconds round
MEASURED = Path(__file__).parents[1] / "docs" / "measurements"
LOAD_S = 2.0  # of the model, before the first batch (start.md)
DECIDE_S, DECIDE_BATCHES = 0.3, 3  # as workloads.moving has them


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and batch as they were measured; seconds."""

    name: str
    batch: int
    eager_s: float
    quick_s: float  # a replay of eager's kernels
    stored_s: float  # a replay of the winner
    build_s: float
    note: str = ""
    call_s: float | None = None  # a call in eager alone; None: `eager_s`
    kernels_s: float | None = None  # what the job measures of its kernels; None: `quick_s`
    capture_s: float | None = None  # measured in the job; None: what is expected, times the factor
    load_s: float = LOAD_S


# ResNet-50 in fp16 as jobs measured it (first-runs.md): the threads that read delay the launches of a batch, which so
# takes longer than a call alone. The stored schedule's rate is that of scoring.md, its build's time that of h200.md.
_IN_JOBS = [
    Case(
        name="resnet50",
        note=f" in a job at {eager_s * 1e3:.1f} ms",
        batch=32,
        eager_s=eager_s,
        quick_s=0.0039,
        stored_s=0.00098,
        build_s=22.9,
        call_s=call_s,
        kernels_s=0.00403,
        capture_s=capture_s,
        load_s=0.4,
    )
    for eager_s, call_s, capture_s in ((0.00652, 0.0045, 1.3), (0.00803, 0.0055, 1.29), (0.00924, 0.00924, 1.52))
]


def cases() -> list[Case]:
    """Batch 1 of h200-bench.json, where a CUDA graph of eager was measured, with the search of a job (h200.md) where
    that was; batch 32 of h200-bench-throughput.json, a graph of eager taken for as slow as eager over two; and what
    jobs have measured of themselves.
    """
    searched = {"resnet50": 22.9, "mobilenet_v2": 24.8, "inception_v3": 43.2}
    found = []
    times: dict[str, dict[str, dict[str, Any]]] = {}
    for row in json.loads((MEASURED / "h200-bench.json").read_text())["results"]:
        if (row["dtype"], row["mode"], row["batch"]) == ("fp16", "inference", 1) and row["replay_us"]:
            times.setdefault(row["model"], {})[row["system"]] = row
    for model, by in times.items():
        if {"eager", "cuda-graph", "ours"} <= by.keys():
            us = {name: by[name]["replay_us"] / 1e6 for name in ("eager", "cuda-graph", "ours")}
            build_s = searched.get(model, by["ours"]["prepare_s"])
            found.append(
                Case(
                    name=model,
                    batch=1,
                    eager_s=us["eager"],
                    quick_s=us["cuda-graph"],
                    stored_s=us["ours"],
                    build_s=build_s,
                )
            )
    rows = json.loads((MEASURED / "h200-bench-throughput.json").read_text())["results"]
    for model in dict.fromkeys(row["model"] for row in rows):
        by_system = {row["system"]: row for row in rows if row["model"] == model and not row["in_flight"]}
        eager_s, ours = by_system["eager"]["replay_us"] / 1e6, by_system["ours"]
        found.append(
            Case(
                name=model,
                batch=32,
                eager_s=eager_s,
                quick_s=eager_s / 2,
                stored_s=ours["replay_us"] / 1e6,
                build_s=ours["prepare_s"],
            )
        )
    return found + _IN_JOBS


def first_run_s(case: Case, records: int, *, factor: float) -> tuple[float, float, Plan]:
    """Seconds of the first run and of the same job in eager, both with loading; what was decided."""
    record_s = case.eager_s / case.batch
    eager_s = case.load_s + records * record_s
    done = max((DECIDE_BATCHES + 1) * case.batch, int(DECIDE_S / record_s) + case.batch)
    if done >= records:
        return eager_s, eager_s, Plan.NOTHING
    ratio = (case.kernels_s or case.quick_s) / case.eager_s
    costs = expected([], model=case.name, on_gpu=True, call_s=case.call_s or case.eager_s, quick_ratio=ratio)
    now = Situation(left=records - done, record_s=record_s, spent_s=case.load_s + done * record_s, idle_cores=12.0)
    plan = decide(now, costs).plan
    truth = replace(
        costs,
        quick_s=case.capture_s or costs.quick_s * factor,
        quick_ratio=case.quick_s / case.eager_s,
        build_s=case.build_s * factor,
        build_ratio=case.stored_s / case.eager_s,
    )
    return now.spent_s + _takes_s(plan, now, truth), eager_s, plan


def _takes_s(plan: Plan, now: Situation, truth: Costs) -> float:
    """Seconds to the end of the job, by true costs."""
    record_s, first_s = now.record_s, 0.0
    if plan.quick:
        first_s, record_s = truth.quick_s, now.record_s * truth.quick_ratio
    if plan is Plan.WAIT:
        return truth.build_s + truth.move_s + now.left * now.record_s * truth.build_ratio
    if not plan.beside:
        return first_s + now.left * record_s
    slower, lasts_s = beside(now, truth)
    meanwhile = lasts_s / (record_s * (1 + slower))
    if meanwhile >= now.left:
        return first_s + now.left * record_s * (1 + slower)
    left, after_s = now.left - meanwhile, now.record_s * truth.build_ratio
    moves = move_pays(left, record_s, after_s, truth)
    return first_s + lasts_s + (truth.move_s + left * after_s if moves else left * record_s)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--build", type=float, default=1.0, help="how many times as long as measured a build takes")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    bad = 0
    print("| model, batch | " + " | ".join(f"{n:,}" for n in RECORDS) + " |")
    print("|---|" + "---|" * len(RECORDS))
    for case in cases():
        cells = []
        for records in RECORDS:
            took_s, eager_s, plan = first_run_s(case, records, factor=given.build)
            over = took_s / eager_s
            bad += over > MOST or (records >= SURE_FROM and over > LESS)
            rows.append(
                {
                    "model": case.name + case.note,
                    "batch": case.batch,
                    "records": records,
                    "first_run_s": took_s,
                    "eager_s": eager_s,
                    "over_eager": over,
                    "plan": plan.value,
                }
            )
            cells.append(f"{over:.2f} {plan.value}")
        print(f"| {case.name}{case.note}, {case.batch} | " + " | ".join(cells) + " |")
    worst = max(row["over_eager"] for row in rows)
    print(f"\nworst {worst:.3f}; {bad} of {len(rows)} beyond the bar", file=sys.stderr)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
