"""Writes docs/cli.md from the help of every command; `--check` fails when the file is stale."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import typer

from nimble_jobs.cli.main import app, main

PAGE = Path(__file__).resolve().parents[1] / "docs" / "cli.md"
HEAD = """\
# Commands

Written by `scripts/gen_cli_docs.py` from the commands' own help; do not edit.

What machines read goes to stdout, everything else to stderr. Tables and progress bars appear on terminals only; a pipe
gets tab-separated text, or JSON with `--json`. `NO_COLOR` is honoured.

| exit code | meaning |
|---|---|
| 0 | success |
| 1 | any other error; `--debug` shows the traceback |
| 2 | bad usage or bad spec: one line per problem, nothing queued |
| 100 | job failed |
| 101 | not finished in time |
| 102 | not found |
| 103 | cancelled |
"""


def commands(command: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every command and group, in the order of the help."""
    yield path
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


def help_of(path: tuple[str, ...]) -> str:
    """The help text of one command."""
    captured = io.StringIO()
    with contextlib.redirect_stdout(captured):
        code = main([*path, "--help"])
    text = captured.getvalue()
    if code or not text.strip():
        raise SystemExit(f"no help for {' '.join(path)}: exit code {code}")
    return text.strip()


def page() -> str:
    """The whole page."""
    os.environ["COLUMNS"] = "100"
    parts = [HEAD]
    for path in commands(typer.main.get_command(app)):
        title = " ".join(("nimble-jobs", *path))
        parts.append(f"## {title}\n\n```\n{help_of(path)}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    text = page()
    if sys.argv[1:] == ["--check"]:
        if not PAGE.exists() or PAGE.read_text() != text:
            raise SystemExit(f"{PAGE.name} is stale; run scripts/gen_cli_docs.py")
    else:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(text)
