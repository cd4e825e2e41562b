"""One run of the benchmark: provides files, weights and defaults, then measures pictures or arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nimble_jobs.bench.scoring import arrays, driver, photos
from nimble_jobs.bench.scoring.request import ZOO, ScoringRequest, Wanted, side_of
from nimble_jobs.bench.scoring.results import ScoringResults
from nimble_jobs.bench.scoring.workshop import Workshop
from nimble_jobs.data.listing import list_images
from nimble_jobs.errors import UsageError
from nimble_jobs.spec.formats import SUFFIXES

_FITTED = 256  # files for the weights: `preparation.fitted` passes over those that cannot be decoded

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


def measure(wanted: Wanted, shop: Workshop) -> ScoringResults:
    """Raises UsageError for files, a model or a device that cannot be had, ProcessDied where torch cannot be loaded."""
    return _arrays(wanted, shop) if wanted.format == "npy" else _pictures(wanted, shop)


def _pictures(wanted: Wanted, shop: Workshop) -> ScoringResults:
    if len(wanted.models) != 1 or wanted.models[0].startswith(ZOO):
        raise UsageError(f"--model: {','.join(wanted.models)}; expected one model of torchvision")
    [model] = wanted.models
    folder, files = _jpegs(wanted, shop)
    asked = {"model": model, "side": wanted.side or side_of(model), "weights": str(shop.weights)}
    environment, request = _prepared(wanted, shop, {**asked, "files": [str(file) for file in files[:_FITTED]]})
    sizes = [file.stat().st_size for file in files]
    environment["files"] = {
        "count": len(files),
        "bytes": {"mean": sum(sizes) / len(sizes), "least": min(sizes), "most": max(sizes)},
        "pixels": f"{wanted.size[0]}x{wanted.size[1]}" if (folder / photos.MANIFEST).exists() else None,
    }
    return driver.run(request, folder, files, shop, environment)


def _jpegs(wanted: Wanted, shop: Workshop) -> tuple[Path, list[Path]]:
    """A folder of the user's, or our own, and the files in it that a job scores. Raises UsageError, DataError."""
    width, height = wanted.size
    own = wanted.files is None or (wanted.files / photos.MANIFEST).exists()
    if not own and wanted.files is not None and wanted.files.is_dir():
        files = _listed(wanted.files)
        if files:
            return wanted.files, files
    sources = photos.sources(wanted.photos)
    names = tuple(path.name for path in sources)
    recipe = photos.Recipe(count=wanted.count, width=width, height=height, photos=names)
    folder = wanted.files or shop.folder.parent / f"jpeg-{wanted.count}-{width}x{height}-{recipe.digest[:8]}"
    photos.provide(folder, recipe, sources, shop.told)
    return folder, _listed(folder)


def _listed(folder: Path) -> list[Path]:
    """What a job over the folder scores, so that all systems score the same."""
    root, names, _ = list_images(str(folder), SUFFIXES["images"])
    other = next((name for name in names if not name.lower().endswith((".jpg", ".jpeg"))), None)
    if other is not None:
        raise UsageError(f"--images: {root / other} is no JPEG; expected JPEGs alone, which all systems can decode")
    return [root / name for name in names]


def _arrays(wanted: Wanted, shop: Workshop) -> ScoringResults:
    environment, first = _prepared(wanted, shop, {})
    results = ScoringResults(environment=environment)
    for model in wanted.models:
        request = replace(first, model=model, side=wanted.side or side_of(model))
        file = arrays.provide(wanted.files or shop.folder.parent / "arrays", wanted.count, request.side)
        for batch in wanted.batch_sizes:
            results.rows.append(arrays.measure(request, file, batch, shop))
            shop.kept(results)
    return results


def _prepared(wanted: Wanted, shop: Workshop, asked: Mapping[str, Any]) -> tuple[dict[str, Any], ScoringRequest]:
    """The environment, and what is to be measured of the first model; `asked` says which weights are to be made."""
    told = shop.step("prepare", {"device": wanted.device, **asked})
    environment = {**told["environment"], "method": METHOD}
    model, device = wanted.models[0], told["device"]
    return environment, ScoringRequest(
        asked=wanted,
        model=model,
        dtype=wanted.dtype or ("fp16" if device == "cuda" else "fp32"),
        side=wanted.side or side_of(model),
        device=device,
        cpus=environment["cpus"],
    )
