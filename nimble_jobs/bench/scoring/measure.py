"""One run of the benchmark: provides files, weights and defaults, then measures pictures or arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nimble_jobs.bench.scoring import arrays, driver, photos
from nimble_jobs.bench.scoring.request import ZOO, ScoringRequest, Setting, System, side_of
from nimble_jobs.bench.scoring.results import ScoringResults
from nimble_jobs.bench.scoring.workshop import Workshop
from nimble_jobs.errors import UsageError

METHOD = {
    "run_s": "from the first to the last record, with shards or the file written. Ours: as `show` says. Loops: from "
    "when their DataLoader has started its workers; compilation and warm-up left out. Ray Data: from when its actor is "
    "ready",
    "wall_s": "of the whole process, from its start to its end",
    "prepare_s": "ours: building the schedule, once; others: what their process does before the clock",
    "outside_s": "wall_s - run_s",
    "same_top1": "share of files with the top-1 of environment.top1_reference, under the same weights",
    "weights": "random, fitted to 64 of the pictures so that classes differ; arrays: random",
    "bare_records_per_s": "the stored schedule's replays alone, as many in flight as in the job; host clock, median",
}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the command was asked for; None: a default that depends on the device or the model."""

    models: tuple[str, ...]
    dtype: str | None = None
    format: str = "images"  # images | npy
    files: Path | None = None
    count: int = 8192
    size: tuple[int, int] = (500, 375)  # width, height
    photos: Path | None = None
    side: int | None = None
    systems: tuple[System, ...] = tuple(System)
    rounds: int = 3
    batch_sizes: tuple[int, ...] = (64, 128)
    workers: tuple[int, ...] | None = None
    fixed: Mapping[System, Setting] = field(default_factory=dict)
    mode: str = "reduce-overhead"
    uncached: bool = False
    device: str = "auto"


def measure(wanted: Wanted, shop: Workshop) -> ScoringResults:
    """Raises UsageError for files, a model or a device that cannot be had, ProcessDied where torch cannot be loaded."""
    return _arrays(wanted, shop) if wanted.format == "npy" else _pictures(wanted, shop)


def _pictures(wanted: Wanted, shop: Workshop) -> ScoringResults:
    if len(wanted.models) != 1 or wanted.models[0].startswith(ZOO):
        raise UsageError(f"--model: {','.join(wanted.models)}; expected one model of torchvision")
    [model] = wanted.models
    side = wanted.side or side_of(model)
    files = _jpegs(wanted, shop)
    asked = {"device": wanted.device, "model": model, "side": side, "weights": str(shop.weights)}
    told = shop.step("prepare", asked | {"files": [str(file) for file in files[:64]]})
    environment, device = _described(told), told["device"]
    sizes = [file.stat().st_size for file in files]
    environment["files"] = {
        "count": len(files),
        "bytes": {"mean": sum(sizes) / len(sizes), "least": min(sizes), "most": max(sizes)},
        "pixels": f"{wanted.size[0]}x{wanted.size[1]}" if (files[0].parent / photos.MANIFEST).exists() else None,
    }
    request = ScoringRequest(
        model=model,
        dtype=wanted.dtype or _dtype(device),
        side=side,
        device=device,
        systems=wanted.systems,
        batch_sizes=wanted.batch_sizes,
        cpus=environment["cpus"],
        workers=wanted.workers,
        fixed=wanted.fixed,
        rounds=wanted.rounds,
        uncached=wanted.uncached,
        mode=wanted.mode,
    )
    return driver.run(request, files, shop, environment)


def _jpegs(wanted: Wanted, shop: Workshop) -> list[Path]:
    """The files of a folder of the user's, or our own."""
    width, height = wanted.size
    own = wanted.files is None or (wanted.files / photos.MANIFEST).exists()
    if not own and wanted.files is not None and wanted.files.is_dir():
        found = sorted(path for path in wanted.files.iterdir() if path.suffix in (".jpg", ".jpeg"))
        if found:
            return found
    sources = photos.sources(wanted.photos)
    names = tuple(path.name for path in sources)
    recipe = photos.Recipe(count=wanted.count, width=width, height=height, photos=names)
    folder = wanted.files or shop.folder.parent / f"jpeg-{wanted.count}-{width}x{height}-{recipe.digest[:8]}"
    return photos.provide(folder, recipe, sources, shop.told)


def _arrays(wanted: Wanted, shop: Workshop) -> ScoringResults:
    told = shop.step("prepare", {"device": wanted.device})
    results = ScoringResults(environment=_described(told))
    device = told["device"]
    for model in wanted.models:
        side = wanted.side or side_of(model)
        request = arrays.ArrayRequest(
            model=model,
            dtype=wanted.dtype or _dtype(device),
            side=side,
            device=device,
            batch_sizes=wanted.batch_sizes,
            count=wanted.count,
            rounds=wanted.rounds,
            uncached=wanted.uncached,
        )
        file = arrays.provide(wanted.files or shop.folder.parent / "arrays", wanted.count, side)
        for batch in request.batch_sizes:
            results.rows.append(arrays.measure(request, file, batch, shop))
            shop.kept(results)
    return results


def _dtype(device: str) -> str:
    return "fp16" if device == "cuda" else "fp32"


def _described(told: dict[str, Any]) -> dict[str, Any]:
    return {**told["environment"], "method": METHOD}
