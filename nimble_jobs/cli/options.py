"""Shared by the commands: global options, options of listings, and opening the store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nimble_jobs.errors import UsageError

if TYPE_CHECKING:
    from nimble_jobs.settings import Settings as Configured
    from nimble_jobs.store import Store


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The global options."""

    home: str | None = None
    debug: bool = False


def unset(flag: str, metavar: str, about: str, **more: Any) -> Any:
    """An option that is None unless it is given; its help names no default."""
    return typer.Option(flag, metavar=metavar, help=about, show_default=False, **more)


Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
IdsOnly = Annotated[bool, typer.Option("--quiet", "-q", help="Print ids only, one per line.")]
Filters = Annotated[
    list[str] | None,
    typer.Option(
        "--filter",
        metavar="KEY=VALUE",
        help="Show only matching rows; also !=, >, <, >=, <=, and * in text. Repeatable.",
    ),
]
Sort = Annotated[
    str | None, typer.Option("--sort", metavar="KEY", help="Sort by a key of the JSON rows; -KEY reverses.")
]
Limit = Annotated[int | None, typer.Option("--limit", "-n", min=1, help="Print this many rows at most.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be done; change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
SpecFile = Annotated[
    Path, typer.Argument(metavar="SPEC", help="Job spec, a YAML file; - reads standard input.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Fields to override, by dotted path.", show_default=False),
]
AllowPython = Annotated[
    list[Path] | None,
    typer.Option(
        "--allow-python", metavar="DIR", help="Folder whose Python files may be executed as models. Repeatable."
    ),
]
GpuMemory = Annotated[
    str | None,
    typer.Option(
        "--gpu-memory", metavar="SIZE", help="The --gpu-memory of the worker that will run the jobs, if you set one."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]


def settings(ctx: typer.Context) -> Settings:
    held = ctx.find_root().obj
    return held if isinstance(held, Settings) else Settings()


def home(ctx: typer.Context) -> Path:
    """The state folder. Raises StateFolderRefused."""
    from nimble_jobs.store.home import resolve

    return resolve(settings(ctx).home)


def chosen_home(ctx: typer.Context) -> Path:
    """The path of the state folder, which need not exist yet."""
    from nimble_jobs.settings import choose

    return choose(settings(ctx).home)


@contextmanager
def store(ctx: typer.Context) -> Iterator[Store]:
    """The open store of this state folder."""
    from nimble_jobs.store import open_store

    opened = open_store(home(ctx))
    try:
        yield opened
    finally:
        opened.close()


def configured(ctx: typer.Context, **given: str | None) -> Configured:
    """The configuration of the state folder, overridden by the command line. Raises SettingsError."""
    from nimble_jobs.settings import read_settings

    if given.get("device") is not None:
        device(str(given["device"]), "--device")
    if given.get("gpu_memory") is not None:
        size(given["gpu_memory"], "--gpu-memory")
    return read_settings(chosen_home(ctx), given=given)


def duration(text: str | None, option: str) -> float | None:
    """`10m` as seconds. Raises UsageError naming the option."""
    if text is None:
        return None
    from nimble_jobs.spec.units import parse_duration

    try:
        return parse_duration(text)
    except ValueError as e:
        raise UsageError(f"{option}: {e}") from e


def size(text: str | None, option: str) -> int | None:
    """`20GB` as bytes. Raises UsageError naming the option."""
    if text is None:
        return None
    from nimble_jobs.spec.units import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as e:
        raise UsageError(f"{option}: {e}") from e


def device(text: str, option: str) -> str:
    """`cuda:1` as it is. Raises UsageError naming the option."""
    from nimble_jobs.spec.units import parse_device

    try:
        return parse_device(text)
    except ValueError as e:
        raise UsageError(f"{option}: {e}") from e


def confirmed(question: str, *, yes: bool) -> bool:
    """Ask on a terminal. Raises UsageError if stdin is no terminal."""
    import sys

    if yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(
            f"{question} Not a terminal, so there is nobody to ask; pass --yes, or look first with --dry-run"
        )
    return typer.confirm(question, err=True)
