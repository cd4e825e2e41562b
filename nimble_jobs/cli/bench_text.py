"""bench text: whole embedding jobs from a file of texts to Parquet, beside sentence-transformers and loops by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nimble_jobs.cli import options
from nimble_jobs.cli.bench_files import check_files, check_new, workshop
from nimble_jobs.cli.options import unset

if TYPE_CHECKING:
    from nimble_jobs.bench.text import TextResults


def register(app: typer.Typer) -> None:
    app.command()(text)


def text(  # long, since each option is a parameter
    ctx: typer.Context,
    models: Annotated[
        str,
        typer.Option(
            "--models", metavar="NAMES", help="minilm, bert-base (random weights), or folders, separated by commas."
        ),
    ] = "minilm",
    dtype: Annotated[str | None, unset("--dtype", "NAME", "fp32, fp16, bf16; default: fp16, fp32 on a CPU.")] = None,
    count: Annotated[int, typer.Option("--count", min=1, help="Number of texts.")] = 20000,
    median_words: Annotated[
        float, typer.Option("--median-words", min=1.0, help="Median number of words in a text.")
    ] = 60.0,
    sigma: Annotated[
        float, typer.Option("--sigma", min=0.0, help="Standard deviation of the logarithm of the texts' lengths.")
    ] = 0.9,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the texts.")] = 0,
    max_length: Annotated[int, typer.Option("--max-length", min=8, help="Cut texts after this many tokens.")] = 512,
    systems: Annotated[
        str | None, unset("--systems", "NAMES", "Systems to measure: all, ours, loops, or names.")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="How often to run each system.")] = 3,
    batch_sizes: Annotated[
        str, typer.Option("--batch-sizes", metavar="N,...", help="Batch sizes to try; each loop uses its fastest.")
    ] = "32,128,256",
    compile_modes: Annotated[
        str, typer.Option("--compile-modes", metavar="MODES", help="Modes of torch.compile to try.")
    ] = "default,max-autotune-no-cudagraphs,reduce-overhead",
    searched: Annotated[
        int, typer.Option("--searched", min=1, help="Number of texts to try each batch size and mode on.")
    ] = 4096,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda.")] = "auto",
    limit: Annotated[
        str, typer.Option("--limit", metavar="TIME", help="Time limit for each process, such as 10m.")
    ] = "10m",
    json: Annotated[Path | None, unset("--json", "FILE", "Write the results.")] = None,
    quiet: options.Quiet = False,
) -> None:
    """Compare whole embedding jobs, from texts to Parquet: nimble-jobs, sentence-transformers, hand-written loops.

    The texts are English from the documentation of installed packages, with log-normal lengths. The loops are in
    nimble_jobs/bench/text/loops. Every run is a process of its own, and every loop uses its best batch size and mode
    of torch.compile. All embeddings are compared.
    """
    from nimble_jobs.bench import request as asked
    from nimble_jobs.bench import text as bench
    from nimble_jobs.cli import bench_text_tables

    check_files(None, json)
    check_new(json)
    wanted = bench.TextWanted(
        models=asked.split(models, "--models"),
        recipe=bench.Recipe(count=count, median_words=median_words, sigma=sigma, seed=seed),
        dtype=asked.dtypes_of(dtype)[0] if dtype else None,
        systems=bench.text_systems_of(systems),
        rounds=rounds,
        batch_sizes=asked.numbers_of(batch_sizes, "--batch-sizes"),
        modes=bench.compile_modes_of(compile_modes),
        max_length=max_length,
        searched=searched,
        device=options.device(device, "--device"),
    )
    shop = workshop(ctx, "text-work", "text-home", options.duration(limit, "--limit") or 600.0, quiet=quiet)
    shop = replace(shop, room="nimble_jobs.bench.text")

    def kept(found: TextResults) -> None:
        if json is not None:
            found.save(json)

    bench_text_tables.show(bench.measure(wanted, shop, kept))


def present(file: Path) -> None:
    """Print what `--json` wrote."""
    from nimble_jobs.bench.text import TextResults
    from nimble_jobs.cli import bench_text_tables

    bench_text_tables.show(TextResults.load(file))
