"""Jobs over raw uint8 arrays, against the bare replay of the same stored schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from nimble_jobs.bench.process import ProcessDied
from nimble_jobs.bench.scoring import page_cache
from nimble_jobs.bench.scoring.ours import Job, array_input
from nimble_jobs.bench.scoring.request import ZOO, ScoringRequest
from nimble_jobs.bench.scoring.results import ScoringRow, Trial
from nimble_jobs.bench.scoring.workshop import Workshop
from nimble_jobs.errors import UsageError

SYSTEM = "ours-npy"
_BLOCK = 256  # records that are random; the file repeats them
_FACTORY = """\
from nimble_jobs.bench import zoo


def make():
    return zoo.create({name!r})
"""


def provide(folder: Path, count: int, side: int) -> Path:
    """A seeded uint8 npy [count, side, side, 3], made where it is not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"uint8-{count}x{side}x{side}x3.npy"
    shape = (count, side, side, 3)
    if path.exists():
        kept = np.load(path, mmap_mode="r")
        if kept.shape == shape and kept.dtype == np.uint8:
            return path
    partial = path.with_suffix(".partial")
    block = np.random.default_rng(0).integers(0, 256, (min(_BLOCK, count), *shape[1:]), dtype=np.uint8)
    with partial.open("wb") as file:
        header = {"descr": "|u1", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for first in range(0, count, _BLOCK):
            block[: count - first].tofile(file)
    partial.replace(path)
    return path


def measure(request: ScoringRequest, file: Path, batch: int, shop: Workshop) -> ScoringRow:
    """The job's records a second with one batch size, and those of the bare replay."""
    job = _job(request, file, batch, shop)
    found = ScoringRow(
        model=request.model, system=SYSTEM, dtype=request.dtype, batch=batch, records=request.asked.count
    )
    shop.told(f"{request.model}, batch {batch}: building the schedule")
    made, error = job.build()
    if error is not None:
        return replace(found, error=error)
    found = replace(found, prepare_s=(made or {}).get("build_s"))
    rates: list[float] = []
    for number in range(request.asked.rounds):
        state = page_cache.arrange([file], uncached=request.asked.uncached)
        row, ended = job.run()
        if row is None:
            return replace(found, error=ended.error)
        trial = Trial(run_s=row["timings"]["run_s"], wall_s=ended.wall_s, files=state)
        found = replace(found, trials=(*found.trials, trial))
        try:
            bare = shop.step("bare", _asked(job))
        except (UsageError, ProcessDied) as e:
            return replace(found, error=str(e))
        rates.append(bare["records_per_s"])
        job_rate = request.asked.count / trial.run_s
        shop.told(f"round {number + 1}: {request.model}: job {job_rate:,.0f}/s, bare replay {rates[-1]:,.0f}/s")
        found = replace(found, replay_us=bare["replay_us"], facts={"hit": row["schedule"]["hit"], **bare})
    return replace(found, bare_records_per_s=median(rates))


def _job(request: ScoringRequest, file: Path, batch: int, shop: Workshop) -> Job:
    name, source = request.model.removeprefix(ZOO), f"torchvision:{request.model}"
    zoo = request.model.startswith(ZOO)
    if zoo:
        factory = shop.folder / f"{name}.py"
        factory.write_text(_FACTORY.format(name=name))
        source = f"python:{factory}:make"
    spec = {
        "model": {"source": source, "dtype": request.dtype},
        "input": array_input(file, batch),
        "run": {"device": request.device},
    }
    return Job(name=f"npy-{name}-{batch}", spec=spec, shop=shop, allow_python=shop.folder if zoo else None)


def _asked(job: Job) -> dict[str, Any]:
    allowed: Sequence[str] = [str(job.allow_python)] if job.allow_python else []
    return {"spec": str(job.spec_file), "home": str(job.shop.home), "allow_python": allowed}
