"""The doctor command: checks whether this machine and this state folder are fit for work."""

from __future__ import annotations

import os
import platform
import sqlite3
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nimble_jobs.cli import options, output
from nimble_jobs.cli.cache_rows import wanted_line
from nimble_jobs.errors import JobFailed, NimbleError, UsageError
from nimble_jobs.plural import count
from nimble_jobs.version import __version__
from nimble_jobs.views import figures, health

if TYPE_CHECKING:
    from nimble_jobs.store import Store

_PACKAGES = ("torch", "torchvision", "triton", "sqlalchemy", "pyarrow", "numpy", "timm", "transformers")
_OPTIONAL = ("triton", "timm", "transformers")
_COMPILED = ("nimble_jobs", "torch", "sqlalchemy", "pydantic")  # those of a start that take longest to compile
_FREE_BYTES = 1 << 30
_WANTED = 5  # how many missing schedules are listed, the most promising first
_NEWEST = 5000  # how many jobs are read without --all


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check."""

    name: str
    detail: str
    status: str = "ok"  # ok | note | problem


def register(app: typer.Typer) -> None:
    app.command()(doctor)


def doctor(
    ctx: typer.Context,
    json: options.Json = False,
    no_device: Annotated[
        bool, typer.Option("--no-device", help="Do not look for a GPU and do not load torch: quicker.")
    ] = False,
    all_jobs: Annotated[
        bool, typer.Option("--all", help=f"Read all jobs, not only the newest {_NEWEST:,} and the running ones.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="DIR", help="Check this folder of a transformers model instead, without loading it."
        ),
    ] = None,
) -> None:
    """Check Python, torch, the GPU, SQLite and the state folder; or a model. Exits 100 if something is wrong."""
    if model is not None:
        findings = list(_model(Path(model.removeprefix("transformers:"))))
    else:
        findings = [*_software(), *_home(ctx, all_jobs=all_jobs), *(() if no_device else _device())]
    problems = [finding for finding in findings if finding.status == "problem"]
    if json:
        output.emit_json({"ok": not problems, "findings": findings})
    else:
        _print(findings)
    if problems:
        raise typer.Exit(JobFailed.exit_code)


def _model(folder: Path) -> Iterator[Finding]:
    from nimble_jobs.models.examine import examine

    if not folder.is_dir():
        raise UsageError(f"--model: there is no folder {folder}")
    yield from (Finding(name=t.name, detail=t.detail, status=t.status) for t in examine(folder))


def _software() -> Iterator[Finding]:
    yield Finding(name="nimble-jobs", detail=__version__)
    supported = sys.version_info[:2] >= (3, 11)
    yield Finding(
        name="python",
        detail=f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        status="ok" if supported else "problem",
    )
    for package in _PACKAGES:
        try:
            yield Finding(name=package, detail=version(package))
        except PackageNotFoundError:
            optional = package in _OPTIONAL
            yield Finding(
                name=package,
                detail="not installed" + (" (optional)" if optional else ""),
                status="note" if optional else "problem",
            )
    yield from _bytecode()
    from nimble_jobs.store.sqlite import journal_mode

    journal = "write-ahead log" if journal_mode() == "WAL" else "rollback journal"
    yield Finding(name="sqlite", detail=f"{sqlite3.sqlite_version}, {journal}")


def _bytecode() -> Iterator[Finding]:
    """A finding about packages that every process compiles anew, which makes a `run` twice as long."""
    from importlib.machinery import PathFinder  # unlike find_spec, it looks again at what is imported

    specs = map(PathFinder.find_spec, _COMPILED)
    files = {spec.name: Path(spec.cached) for spec in specs if spec is not None and spec.cached}
    names = ", ".join(name for name, file in files.items() if not file.is_file() and not _can_be_kept(file))
    if names:
        what = f"every process compiles {names} anew, which takes seconds"
        if sys.dont_write_bytecode:
            advice = "unset PYTHONDONTWRITEBYTECODE, or compile them once with python -m compileall"
        else:
            advice = "let PYTHONPYCACHEPREFIX name a folder that you can write to"
        yield Finding(name="bytecode", detail=f"{what}; {advice}", status="note")


def _can_be_kept(file: Path) -> bool:
    """Whether Python can and may write a compiled module to this file."""
    folder = next(folder for folder in file.parents if folder.exists())
    return not sys.dont_write_bytecode and os.access(folder, os.W_OK)


def _home(ctx: typer.Context, *, all_jobs: bool) -> Iterator[Finding]:
    import shutil

    from nimble_jobs import client
    from nimble_jobs.store.health import elsewhere_on, health_of

    try:
        home = options.home(ctx)
        yield Finding(name="home", detail=f"{home} (mode {home.stat().st_mode & 0o777:04o})")
        free = shutil.disk_usage(home).free
        yield Finding(name="free disk", detail=figures.size(free), status="ok" if free >= _FREE_BYTES else "problem")
        with options.store(ctx) as store:
            yield from _server(store)
            jobs = sum(store.jobs.counts().values())
            newest = None if all_jobs or jobs <= _NEWEST else _NEWEST
            problems = store.check(newest=newest)
            yield from (Finding(name="store", detail=problem, status="problem") for problem in problems)
            if not problems:
                kept = f"{count(jobs, 'job')}, {count(len(store.schedules.list()), 'schedule')}"
                part = "" if newest is None else f" (read the newest {newest:,} jobs; --all reads all)"
                yield Finding(name="store", detail=f"sound: {kept}{part}")
            yield from _left(store)
            for wanted in store.wanted.list()[:_WANTED]:
                yield Finding(name="wanted", detail=wanted_line(wanted), status="note")
            problem = store.settings.problem
            if problem is not None:
                detail = f"not valid; workers keep the previous values: {problem}"
                yield Finding(name="config.yaml", detail=detail, status="problem")
            yield from (
                Finding(name="notifications", detail=text, status=status)
                for status, text in health.notification_findings(store)
            )
            yield from (
                Finding(name="timers", detail=text, status=status)
                for status, text in health.timer_findings(store, time.time())
            )
            workers = client.live_workers(store=store)
            for found in (health_of(worker, home) for worker in workers):
                if found.state is not None:
                    yield Finding(name="worker", detail=found.words, status="problem" if found.broken else "note")
            named = (f"{w.id} on {w.device}" + (f" of {host}" if (host := elsewhere_on(w)) else "") for w in workers)
            yield Finding(name="workers", detail=", ".join(named) or "none running")
    except NimbleError as e:
        yield Finding(name="home", detail=str(e), status="problem")


def _server(store: Store) -> Iterator[Finding]:
    """Findings about the server of a database that several state folders share."""
    if (server := store.server()) is None:
        return
    name, facts = server
    yield Finding(name="database", detail=name)
    yield from (Finding(name="database", detail=f.detail, status="ok" if f.sound else "problem") for f in facts)


def _left(store: Store) -> Iterator[Finding]:
    """Findings about hidden folders beside outputs whose jobs have ended."""
    import shlex

    from nimble_jobs.retention.folders import left_over

    for path, job in left_over(store).items():
        what = (
            "checkpoints from which the same training can resume" if path.suffix == ".training" else "never published"
        )
        detail = f"{path}: left by job {job.id} ({job.state}), {what}; remove it with: rm -r {shlex.quote(str(path))}"
        yield Finding(name="left", detail=detail, status="note")


def _device() -> Iterator[Finding]:
    try:
        from nimble_jobs.engine import device
    except ImportError as e:
        yield Finding(name="device", detail=f"torch cannot be loaded: {e}", status="problem")
        return
    found = device.resolve("auto")
    facts = device.facts(found)
    described = device.describe(found)
    if found.type == "cuda":
        detail = f"{described}, driver {facts['driver']}, CUDA {facts['cuda']}, {facts['device.memory_gib']} GiB"
        yield Finding(name="device", detail=detail)
        yield from _queues()
    else:
        yield Finding(name="device", detail=f"{described}; no CUDA device: jobs run on the CPU", status="note")


def _queues() -> Iterator[Finding]:
    """A finding about streams that wait for each other, because the user asks CUDA for few queues."""
    from nimble_jobs.machine import MOST_QUEUES, QUEUES

    given = os.environ.get(QUEUES)
    if given is not None and not (given.isdecimal() and int(given) >= MOST_QUEUES):
        why = "streams that share a queue run one after another, and pictures that the GPU decodes wait for the model"
        detail = f"{QUEUES} is {given!r} here: {why}; unset it where workers start, and they ask for {MOST_QUEUES}"
        yield Finding(name="queues", detail=detail, status="note")


def _print(findings: list[Finding]) -> None:
    if not output.on_terminal():
        for finding in findings:
            output.emit(f"{finding.status}\t{finding.name}\t{' '.join(finding.detail.split())}")
        return
    from rich.table import Table
    from rich.text import Text

    mark = {"ok": Text("✓", style="green"), "note": Text("-", style="yellow"), "problem": Text("✗", style="bold red")}
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(mark[finding.status], finding.name, Text(finding.detail))
    output.console().print(table)
