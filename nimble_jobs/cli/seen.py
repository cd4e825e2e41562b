"""Commands about the files that jobs with `input.only_new` have scored: seen ls, forget."""

from __future__ import annotations

import time
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from nimble_jobs.cli import options, output
from nimble_jobs.cli.listing import Column, print_rows
from nimble_jobs.errors import NotFound
from nimble_jobs.plural import plural
from nimble_jobs.views import figures
from nimble_jobs.views.figures import Row

if TYPE_CHECKING:
    from nimble_jobs.seen import Seen
    from nimble_jobs.store import Store
    from nimble_jobs.store.seen import SeenSource

_AT_MOST = 1000  # files listed, unless --limit says otherwise
_NAMED = 3  # files named in a question

app = typer.Typer(
    name="seen", help="List or forget the files that jobs with input.only_new have scored.", no_args_is_help=True
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the jobs, or of their timer.", show_default=False)]
MaybeName = Annotated[
    str | None,
    typer.Argument(metavar="NAME", help="Name of the jobs, or of their timer; default: all names.", show_default=False),
]
PathGlob = Annotated[
    str | None,
    typer.Option("--path", metavar="GLOB", help="Only files whose path below the folder matches; * also matches /."),
]

SOURCES = (
    Column(header="NAME", cell=lambda row: row["name"], flexible=True),
    Column(header="FILES", cell=lambda row: f"{row['files']:,}", justify="right"),
    Column(header="RUNS", cell=lambda row: f"{row['runs']:,}", justify="right"),
    Column(header="LAST", cell=lambda row: (row["last_at"] or "-")[:19].replace("T", " ")),
    Column(header="FOLDER", cell=lambda row: figures.short_path(row["root"]), flexible=True, gives_first=True),
)
FILES = (
    Column(header="PATH", cell=lambda row: row["path"], flexible=True, gives_first=True),
    Column(header="SIZE", cell=lambda row: figures.size(row["bytes"]), justify="right"),
    Column(header="WRITTEN", cell=lambda row: row["modified_at"][:19].replace("T", " ")),
    Column(header="SCORED", cell=lambda row: row["at"][:19].replace("T", " ")),
    Column(header="JOB", cell=lambda row: row["job"]),
    Column(
        header="FOLDER", cell=lambda row: figures.short_path(row["root"]), flexible=True, telling=True, from_width=999
    ),
)


@app.command()
def ls(
    ctx: typer.Context,
    name: MaybeName = None,
    path: PathGlob = None,
    limit: options.Limit = None,
    quiet: options.IdsOnly = False,
    json: options.Json = False,
) -> None:
    """List the files that jobs of this name have scored. Without a name, list the names and their folders.

    Lists at most 1,000 files, unless --limit says otherwise. Times are UTC.
    """
    with options.store(ctx) as store:
        if name is None:
            rows = [_source_row(source) for source in store.seen.sources()]
            empty = "no seen files; jobs with input.only_new remember the files that they scored"
            print_rows(rows[:limit], SOURCES, id_key="name", json=json, quiet=quiet, empty=empty)
            return
        known = _known(store, name)
        rows = [_file_row(seen) for seen in islice(_matching(store, name, path), limit or _AT_MOST)]
    print_rows(rows, FILES, id_key="path", json=json, quiet=quiet, empty=f"no seen file of {name} matches {path}")
    if limit is None and len(rows) == _AT_MOST:
        what = f"{known:,} {plural(known, 'file')} of {name} {plural(known, 'is')} seen"
        output.note(f"{what}; use --limit to list more than the first {_AT_MOST:,}")


@app.command()
def forget(
    ctx: typer.Context,
    name: Name,
    path: PathGlob = None,
    dry_run: options.DryRun = False,
    yes: options.Yes = False,
    json: options.Json = False,
) -> None:
    """Forget that files were scored, so that the next run of this name scores them again.

    Published results stay as they are.
    """
    with options.store(ctx) as store:
        known = _known(store, name)
        if path is None:
            count, named = known, "all"
        else:
            count, few = 0, []
            for seen in _matching(store, name, path):
                count += 1
                few += [seen.path] if count <= _NAMED else []
            named = ", ".join(few) + (f" and {count - _NAMED:,} more" if count > _NAMED else "")
        what = f"{count:,} {plural(count, 'file')} of {name}"
        done = not dry_run and count > 0 and options.confirmed(f"Forget {what} ({named})?", yes=yes)
        if done:
            which = None if path is None else lambda seen: fnmatchcase(seen.path, path)
            count = store.seen.forget(name, now=time.time(), which=which)
            what = f"{count:,} {plural(count, 'file')} of {name}"
    if json:
        output.emit_json({"name": name, "files": count, "forgotten": done})
    elif not count:
        output.note(f"no seen file of {name} matches {path}")
    else:
        summary = f"{'would forget' if dry_run else 'forgot'} {what} ({named})"
        output.note(summary if dry_run or done else "nothing was forgotten")


def _known(store: Store, name: str) -> int:
    """The number of seen files of a name. Raises NotFound if there are none."""
    known = sum(source.files for source in store.seen.sources(name))
    if not known:
        raise NotFound(f"no job named {name} has seen files; list the names with: nimble-jobs seen ls")
    return known


def _matching(store: Store, name: str, path: str | None) -> Iterator[Seen]:
    return (seen for seen in store.seen.files(name) if path is None or fnmatchcase(seen.path, path))


def _source_row(source: SeenSource) -> Row:
    return {
        "name": source.name,
        "root": source.root,
        "files": source.files,
        "runs": source.runs,
        "last_at": figures.iso(source.last_at),
    }


def _file_row(seen: Seen) -> Row:
    return {
        "path": seen.path,
        "root": seen.root,
        "bytes": seen.size,
        "modified_at": figures.iso(seen.mtime_ns / 1e9),
        "mtime_ns": seen.mtime_ns,
        "at": figures.iso(seen.at),
        "job": seen.job,
        "model": seen.model,
    }
