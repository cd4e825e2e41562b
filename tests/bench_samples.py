"""Results of the benchmark as a GPU might give them, made up."""

from __future__ import annotations

from typing import Any

from nimble_jobs.bench import Results, Row
from nimble_jobs.bench.request import FAMILIES
from nimble_jobs.bench.zoo import ZOO

ENVIRONMENT: dict[str, Any] = {
    "device": "NVIDIA Sample 9000",
    "driver": "580.1",
    "versions": {"torch": "2.11.0", "cuda": "13.0"},
    "commit": "0123456789ab",
    "date": "2026-01-02T03:04:05+00:00",
    "fp32": "TF32 allowed for all systems",
}
US = {  # of the first model; each further one takes a tenth more
    "eager": 5000.0,
    "torchscript": 2500.0,
    "cuda-graph": 1500.0,
    "compile-default": 2000.0,
    "compile-default+graph": 700.0,
    "compile-reduce-overhead": 720.0,
    "compile-max-autotune": 660.0,
    "compile-max-autotune+graph": 640.0,
    "ours-1-stream": 650.0,
    "ours-streams": 400.0,
    "ours": 400.0,
}


def row(model: str = "resnet50", system: str = "eager", **values: Any) -> Row:
    """A row of fp16, batch 1."""
    given = {"batch": 1, "dtype": "fp16", "layout": "contiguous", "replay_us": US.get(system)}
    return Row(model=model, system=system, **{**given, **values})


def rows(model: str = "resnet50", dtype: str = "fp16", scale: float = 1.0) -> list[Row]:
    """A row of every system; two of them are not installed."""
    found = []
    for system in (s for systems in FAMILIES.values() for s in systems):
        if system in US:
            facts = {"streams": 8, "width": 9} if system == "ours" else {}
            found.append(
                row(
                    model,
                    system,
                    dtype=dtype,
                    replay_us=US[system] * scale,
                    with_copies_us=US[system] * scale + 20,
                    peak_bytes=10_000_000,
                    prepare_s=12.0,
                    idle_share=0.8,
                    facts=facts,
                )
            )
        else:
            found.append(row(model, system, dtype=dtype, error=f"not installed: {system}"))
    return found


def results() -> Results:
    """All twelve models in two dtypes."""
    found = Results()
    found.adopt(ENVIRONMENT)
    for dtype in ("fp16", "fp32"):
        for position, model in enumerate(ZOO):
            found.add(rows(model, dtype, 1 + position / 10))
            found.add(
                [
                    row(model, "ours", dtype=dtype, in_flight=n, replay_us=None, records_per_s=900.0 * n)
                    for n in (1, 2, 4)
                ]
            )
    return found
