"""The paper's tables on this machine: bench inference, bench training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

from nimble_jobs.cli import options, output
from nimble_jobs.cli.bench_files import check_files, check_new, new_log, teller
from nimble_jobs.cli.options import unset
from nimble_jobs.errors import NotFinishedInTime, UsageError

if TYPE_CHECKING:
    from nimble_jobs import bench
    from nimble_jobs.bench import Request, Results

app = typer.Typer(
    name="bench",
    help="Measure speed on this machine, and compare with other ways to run a model.",
    no_args_is_help=True,
)

Layout = Annotated[
    str, typer.Option("--layout", help="Memory format for the other systems: contiguous, channels-last, both.")
]
Fuse = Annotated[str, typer.Option("--fuse", help="What nimble-jobs may compile: auto, off, max.")]
Tolerance = Annotated[
    float | None, unset("--tolerance", "SHARE", "Largest relative difference from eager that is accepted.", min=0.0)
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:N.")]
Limit = Annotated[str, typer.Option("--limit", metavar="TIME", help="Time limit for each system, such as 10m.")]
StopAfter = Annotated[str | None, unset("--stop-after", "TIME", "Stop after this time; --resume measures the rest.")]
Sample = Annotated[str, typer.Option("--sample", metavar="TIME", help="How long to repeat each measurement.")]
Idle = Annotated[
    bool,
    typer.Option("--idle", help="Also profile, to report how much of the time the GPU is idle; starts more processes."),
]
SharedCaches = Annotated[
    bool,
    typer.Option(
        "--shared-caches",
        help="Let compilers reuse their caches on disk: quicker, but the time to prepare (prepare_s) then leaves out "
        "most compilation.",
    ),
]
JsonFile = Annotated[
    Path | None, unset("--json", "FILE", "Write the results to this file, each row as soon as it is measured.")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue the FILE that --json names: measure only what is missing or failed.")
]
Plot = Annotated[Path | None, unset("--plot", "FILE.png", "Draw a bar chart.")]
Log = Annotated[Path | None, unset("--log", "FILE", "File for the compilers' output.")]


@app.command()
def inference(  # long, since each option is a parameter
    ctx: typer.Context,
    models: Annotated[
        str, typer.Option("--models", metavar="NAMES", help="all, more, or names (see above), separated by commas.")
    ] = "all",
    batch: Annotated[str, typer.Option("--batch", metavar="N,...", help="Batch sizes.")] = "1",
    dtype: Annotated[
        str | None,
        unset(
            "--dtype",
            "NAMES",
            "fp32 (with TF32, for all systems), fp16, bf16; default: fp16,fp32, without a GPU fp32.",
        ),
    ] = None,
    systems: Annotated[
        str | None,
        unset(
            "--systems",
            "NAMES",
            "eager, torchscript, cuda-graph, compile (all modes, or compile-default and so on), onnxruntime, "
            "tensorrt, ours; default: all, without a GPU eager,ours.",
        ),
    ] = None,
    layout: Layout = "both",
    in_flight: Annotated[
        str | None, unset("--in-flight", "K,...", "Also measure records/s of nimble-jobs with K replays at once.")
    ] = None,
    fuse: Fuse = "max",
    tolerance: Tolerance = None,
    device: Device = "auto",
    limit: Limit = "10m",
    stop_after: StopAfter = None,
    sample: Sample = "1s",
    idle: Idle = False,
    shared_caches: SharedCaches = False,
    json: JsonFile = None,
    resume: Resume = False,
    plot: Plot = None,
    log: Log = None,
    quiet: options.Quiet = False,
) -> None:
    """Compare eager, TorchScript, CUDA graphs, torch.compile, ONNX Runtime, TensorRT and nimble-jobs (`ours`).

    Models: `all` are the twelve of the paper, `more` are ten others (HRNet, PNASNet, CoaT, MixNet, Inception-v4, ViT,
    DenseNet, ShuffleNet, SqueezeNet, DeepLabv3; they need timm). You can also name single models, or give
    torchvision:NAME[@SIDE].

    Each model is measured in a process of its own. Every output is compared with eager; a system whose output is
    wrong is reported as an error, without a time. Times are in microseconds. Ratios say how many times as fast `ours`
    is. They compare with the fastest eager, and with the fastest torch.compile of all modes and memory formats that
    were measured.
    """
    from nimble_jobs import bench
    from nimble_jobs.bench import request as asked

    wanted = bench.Request(
        models=asked.models_of(models),
        batches=asked.numbers_of(batch, "--batch"),
        dtypes=asked.dtypes_of(dtype) if dtype else None,
        families=asked.families_of(systems) if systems else None,
        in_flight=asked.numbers_of(in_flight, "--in-flight") if in_flight else (),
        layouts=asked.layouts_of(layout),
        fuse=asked.fuse_of(fuse),
        tolerance=tolerance,
        cold_caches=not shared_caches,
        idle=idle,
        **_times(device, limit, stop_after, sample),
    )
    _measure(ctx, wanted, json, plot, log, resume=resume, quiet=quiet)


@app.command()
def training(
    ctx: typer.Context,
    models: Annotated[
        str,
        typer.Option(
            "--models",
            metavar="NAMES",
            help="all, or names of the paper's models; NAME@SIDE for images of another size. Separate by commas.",
        ),
    ] = "all",
    batch: Annotated[str | None, unset("--batch", "N,...", "Batch sizes; default: the paper's, by model.")] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="NAMES", help="fp32 (with TF32, for all systems), bf16 (autocast).")
    ] = "fp32",
    systems: Annotated[
        str | None,
        unset(
            "--systems",
            "NAMES",
            "eager, cuda-graph, compile (all modes, or compile-default and so on), ours; default: all but "
            "compile-max-autotune, without a GPU eager,ours.",
        ),
    ] = None,
    layout: Layout = "both",
    fuse: Fuse = "auto",
    tolerance: Tolerance = None,
    device: Device = "auto",
    limit: Limit = "20m",
    stop_after: StopAfter = None,
    sample: Sample = "1s",
    idle: Idle = False,
    shared_caches: SharedCaches = False,
    json: JsonFile = None,
    resume: Resume = False,
    plot: Plot = None,
    log: Log = None,
    quiet: options.Quiet = False,
) -> None:
    """Compare whole training steps: eager, torch.compile, a CUDA graph of the eager step, nimble-jobs (`ours`).

    Each system runs in a process of its own. The losses of 50 steps are compared with eager's; a system whose losses
    differ is reported as an error and gets no time. Times are of one step, in microseconds.
    """
    from nimble_jobs.bench import request as asked
    from nimble_jobs.bench import training_request as trained

    wanted = trained.TrainingRequest(
        models=trained.models_of(models),
        batches=asked.numbers_of(batch, "--batch") if batch else (),
        dtypes=asked.dtypes_of(dtype, trained.DTYPES),
        families=asked.families_of(systems, asked.TRAINING_FAMILIES) if systems else None,
        layouts=asked.layouts_of(layout),
        fuse=asked.fuse_of(fuse),
        tolerance=tolerance,
        cold_caches=not shared_caches,
        idle=idle,
        **_times(device, limit, stop_after, sample),
    )
    _measure(ctx, wanted, json, plot, log, resume=resume, quiet=quiet)


@app.command()
def show(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE", help="Files that --json wrote. If two hold the same row, the later file's is shown."
        ),
    ],
    plot: Plot = None,
    json: Annotated[Path | None, unset("--json", "FILE", "Write all rows into one file.")] = None,
) -> None:
    """Print the tables of earlier results. Files from the same device are combined."""
    from nimble_jobs.bench import Results
    from nimble_jobs.bench.scoring.results import is_scoring
    from nimble_jobs.bench.text import is_text
    from nimble_jobs.cli import bench_scoring, bench_text

    check_files(plot, json)
    check_new(json)
    kind = "scoring" if is_scoring(files[0]) else "text" if is_text(files[0]) else None
    if kind is not None:
        if len(files) > 1 or json is not None:
            raise UsageError(f"{files[0]}: results of bench {kind} are shown one file at a time, without --json")
        if kind == "scoring":
            bench_scoring.present(files[0], plot)
        elif plot is not None:
            raise UsageError("--plot: results of bench text are a table; there is no chart of them")
        else:
            bench_text.present(files[0])
        return
    together = Results()
    for file in files:
        found = Results.load(file)
        if found.rows:  # a run that was stopped before its first row does not know where it is
            together.adopt(found.environment)
            together.add(found.rows)
    if json is not None:
        together.save(json)
    _present(together, plot)


class _Times(TypedDict):
    """Fields of a request that hold a device or a time."""

    device: str
    limit_s: float
    stop_after_s: float | None
    sample_s: float


def _times(device: str, limit: str, stop_after: str | None, sample: str) -> _Times:
    """Raises UsageError."""
    return {
        "device": options.device(device, "--device"),
        "limit_s": options.duration(limit, "--limit") or 600.0,
        "stop_after_s": options.duration(stop_after, "--stop-after"),
        "sample_s": options.duration(sample, "--sample") or 1.0,
    }


def _measure(
    ctx: typer.Context,
    wanted: Request,
    json: Path | None,
    plot: Path | None,
    log: Path | None,
    *,
    resume: bool,
    quiet: bool,
) -> None:
    """Measure, keep, print and draw."""
    check_files(plot, json, log)
    results = _earlier(json, resume=resume)
    finished = _run(wanted, results, json, log or _log(ctx, json), quiet=quiet)
    _present(results, plot)
    if not finished:
        raise NotFinishedInTime(f"not finished after {wanted.stop_after_s:g} s; --resume measures the rest")


def _present(results: Results, plot: Path | None) -> None:
    from nimble_jobs import bench
    from nimble_jobs.bench.plot import draw
    from nimble_jobs.cli import bench_tables

    comparisons = bench.compare(results.rows)
    bench_tables.show(results, comparisons)
    if plot is not None:
        draw(comparisons, results.environment, plot)
        output.note(f"chart in {plot}")


def _earlier(json: Path | None, *, resume: bool) -> Results:
    """What an earlier run left. Raises UsageError where it would be lost, or is not there."""
    from nimble_jobs.bench import Results

    if resume:
        if json is None:
            raise UsageError("--resume needs the file of the earlier run; name it with --json FILE")
        return Results.load(json) if json.exists() else Results()
    if json is not None and json.exists():
        raise UsageError(f"--json: {json} exists already; add --resume to continue it, or name another file")
    return Results()


def _log(ctx: typer.Context, json: Path | None) -> Path:
    """Beside the results, else in the state folder."""
    if json is not None:
        return json.with_name(f"{json.name}.log")
    return new_log(ctx)


def _run(request: Request, results: Results, json: Path | None, log: Path, *, quiet: bool) -> bool:
    """Whether everything was measured. Results are kept after every unit."""
    from nimble_jobs import bench

    told = teller(quiet=quiet)

    def kept(found: bench.Results) -> None:
        if json is not None and found.environment:  # known once there is a device
            found.save(json)

    told(f"compilers' output goes to {log}")
    try:
        return bench.run(request, results, log=log, told=told, kept=kept)
    finally:
        kept(results)
