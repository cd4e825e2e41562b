"""bench scoring: whole scoring jobs from files to Parquet, ours beside hand-written loops and Ray Data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nimble_jobs.cli import options, output
from nimble_jobs.cli.bench_files import check_files, check_new, workshop
from nimble_jobs.cli.options import unset
from nimble_jobs.errors import UsageError

if TYPE_CHECKING:
    from nimble_jobs.bench.scoring import ScoringResults


def register(app: typer.Typer) -> None:
    app.command()(scoring)


def scoring(  # long, since each option is a parameter
    ctx: typer.Context,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="NAME",
            help="Name of a torchvision model; with npy also zoo:NAME, or several, separated by commas.",
        ),
    ] = "resnet50",
    dtype: Annotated[str | None, unset("--dtype", "NAME", "fp32, fp16, bf16; default: fp16, fp32 on a CPU.")] = None,
    format_: Annotated[
        str,
        typer.Option("--format", help="images: score JPEG files; npy: score arrays, and compare with the bare replay."),
    ] = "images",
    images: Annotated[
        Path | None,
        unset(
            "--images",
            "DIR",
            "Folder of the input files, with its subfolders; made if missing; default: the state folder's bench/.",
        ),
    ] = None,
    count: Annotated[int, typer.Option("--count", min=1, help="Number of JPEG files; with npy, of records.")] = 8192,
    size: Annotated[str, typer.Option("--size", metavar="WxH", help="Size of the JPEGs in pixels.")] = "500x375",
    photos: Annotated[
        Path | None,
        unset(
            "--photos",
            "DIR",
            "Folder of photographs to make the JPEGs from; default: scikit-image's and scikit-learn's.",
        ),
    ] = None,
    side: Annotated[
        int | None, unset("--side", "PIXELS", "Height and width of the model's input; default: the model's own.", min=1)
    ] = None,
    systems: Annotated[
        str | None, unset("--systems", "NAMES", "Systems to measure: all, ours, loops, or names.")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="How often to run each system.")] = 3,
    batch_sizes: Annotated[
        str, typer.Option("--batch-sizes", metavar="N,...", help="Batch sizes to try; each system uses its fastest.")
    ] = "64,128",
    workers: Annotated[
        str | None,
        unset(
            "--workers", "N,...", "Numbers of worker processes to try in each loop; default: by the number of cores."
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        unset(
            "--setting",
            "SYSTEM=BATCH[/WORKERS]",
            "Use this batch size and number of workers for SYSTEM; try no others. Repeatable.",
        ),
    ] = None,
    compile_mode: Annotated[
        str, typer.Option("--compile-mode", metavar="MODE", help="Mode of torch.compile in the loops.")
    ] = "reduce-overhead",
    uncached: Annotated[
        bool, typer.Option("--uncached", help="Drop the files from the page cache before each run.")
    ] = False,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda.")] = "auto",
    limit: Annotated[
        str, typer.Option("--limit", metavar="TIME", help="Time limit for each process, such as 10m.")
    ] = "10m",
    json: Annotated[Path | None, unset("--json", "FILE", "Write the results.")] = None,
    png: Annotated[Path | None, unset("--png", "FILE.png", "Draw a bar chart.")] = None,
    quiet: options.Quiet = False,
) -> None:
    """Compare whole scoring jobs, from files to Parquet: nimble-jobs, hand-written loops, Ray Data.

    The loops are in nimble_jobs/bench/loops. Every run is a process of its own, and every system uses its best batch
    size and number of workers. Rates are given from the first to the last record, and for the whole process.
    """
    from nimble_jobs.bench import request as asked
    from nimble_jobs.bench import scoring as bench
    from nimble_jobs.cli import bench_scoring_tables

    check_files(png, json, option="--png")
    check_new(json)
    if format_ not in ("images", "npy"):
        raise UsageError(f"--format: {format_!r} is unknown; expected images, npy")
    wanted = bench.Wanted(
        models=asked.split(model, "--model"),
        dtype=asked.dtypes_of(dtype)[0] if dtype else None,
        format=format_,
        files=images.absolute() if images is not None else None,
        count=count,
        size=bench.size_of(size),
        photos=photos,
        side=side,
        systems=bench.systems_of(systems),
        rounds=rounds,
        batch_sizes=asked.numbers_of(batch_sizes, "--batch-sizes"),
        workers=asked.numbers_of(workers, "--workers") if workers else None,
        fixed=bench.fixed_of(setting or ()),
        mode=compile_mode,
        uncached=uncached,
        device=options.device(device, "--device"),
    )
    shop = workshop(ctx, "work", "home", options.duration(limit, "--limit") or 600.0, quiet=quiet)

    def kept(found: ScoringResults) -> None:
        if json is not None:
            found.save(json)

    results = bench.measure(wanted, replace(shop, kept=kept))
    bench_scoring_tables.show(results)
    _draw(results, png)


def present(file: Path, png: Path | None) -> None:
    """Print, and perhaps draw, what `--json` wrote."""
    from nimble_jobs.bench.scoring import ScoringResults
    from nimble_jobs.cli import bench_scoring_tables

    results = ScoringResults.load(file)
    bench_scoring_tables.show(results)
    _draw(results, png)


def _draw(results: ScoringResults, png: Path | None) -> None:
    if png is None:
        return
    from nimble_jobs.bench.scoring.plot import draw

    draw(results, png)
    output.note(f"chart in {png}")
