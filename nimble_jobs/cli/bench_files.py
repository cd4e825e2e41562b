"""Where benchmarks write, checked before hours are spent, and where they work."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from nimble_jobs.cli import options, output
from nimble_jobs.errors import UsageError

if TYPE_CHECKING:
    from nimble_jobs.bench.scoring import Workshop


def check_files(plot: Path | None, json: Path | None, log: Path | None = None, *, option: str = "--plot") -> None:
    """Raises UsageError, before hours are spent, for what could not be written after them.

    `option` is the one that names `plot`.
    """
    from nimble_jobs.bench.plot import require_matplotlib
    from nimble_jobs.draw import writable

    if plot is not None:
        require_matplotlib(option)
        if plot.suffix.lower() != ".png":
            raise UsageError(f"{option}: {plot}: unknown suffix {plot.suffix!r}; expected .png")
        writable(option, plot)
    if json is not None:
        writable("--json", json)
    if log is not None and (log.is_dir() or not log.exists()):  # what is there is appended to
        writable("--log", log)


def check_new(json: Path | None) -> None:
    """Raises UsageError for a file of results that is there already."""
    if json is not None and json.exists():
        raise UsageError(f"--json: {json} exists already; name another file")


def new_log(ctx: typer.Context) -> Path:
    """A file in the state folder for what processes print; its folder is made."""
    folder = options.home(ctx) / "logs"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / f"bench-{time.strftime('%Y%m%d-%H%M%S')}.log"


def teller(*, quiet: bool) -> Callable[[str], None]:
    """What says a line on stderr, unless it is to be quiet."""
    return (lambda _: None) if quiet else output.note


def workshop(ctx: typer.Context, work: str, home: str, limit_s: float, *, quiet: bool) -> Workshop:
    """A workshop in two new folders below the state folder's `bench/`: `work` for files, `home` for jobs' state."""
    from nimble_jobs.bench.scoring import Workshop

    base = options.home(ctx) / "bench"
    folders = base / work, base / home
    for folder in folders:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    log, told = new_log(ctx), teller(quiet=quiet)
    told(f"what the processes print goes to {log}")
    return Workshop(folder=folders[0], home=folders[1], log=log, limit_s=limit_s, told=told)
