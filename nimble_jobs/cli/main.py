"""The application: global options, and the only place that turns errors into lines on stderr and exit codes."""

from __future__ import annotations

import functools
import itertools
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, NoReturn, TextIO, cast

import typer

from nimble_jobs.cli import (
    bench,
    bench_scoring,
    bench_text,
    cache,
    config,
    cron,
    dashboard,
    doctor,
    job_list,
    jobs,
    metrics,
    notifications,
    prune,
    queue,
    seen,
    specs,
    streams,
    submit,
    worker,
)
from nimble_jobs.cli.options import Settings
from nimble_jobs.cli.output import emit, note, refusal
from nimble_jobs.errors import NimbleError
from nimble_jobs.version import __version__

_COMPLETE = "_NIMBLE_JOBS_COMPLETE"  # set by a shell during completion

app = typer.Typer(
    name="nimble-jobs",
    rich_markup_mode=None,  # plain help, because Rich would double the time of --help
    context_settings={"help_option_names": ["-h", "--help"]},
)
specs.register(app)
submit.register(app)
job_list.register(app)
jobs.register(app)
queue.register(app)
prune.register(app)
doctor.register(app)
metrics.register(app)
dashboard.register(app)
app.add_typer(worker.app)
app.add_typer(cron.app)
app.add_typer(cache.app)
app.add_typer(seen.app)
app.add_typer(config.app)
app.add_typer(notifications.app)
bench_scoring.register(bench.app)
bench_text.register(bench.app)
app.add_typer(bench.app)


def _version(wanted: bool) -> None:
    if wanted:
        emit(f"nimble-jobs {__version__}")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    home: Annotated[
        str | None,
        typer.Option(
            "--home", metavar="DIR", help="State folder; default: NIMBLE_JOBS_HOME, else ./cache, else a user folder."
        ),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Run PyTorch models over files as batch jobs, with GPU schedules that are built once, stored, and replayed.

    --home and --debug may come anywhere on the line.

    Exit codes: 0 success, 2 bad usage or bad spec, 100 job failed, 101 not finished in time, 102 not found,
    103 cancelled, 1 any other error.
    """
    ctx.obj = Settings(home=home, debug=debug)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. Never raises for user errors, nor for a broken stdout."""
    streams.present()
    args = _global_options_first(list(sys.argv[1:] if argv is None else argv))
    before = sys.stdout, sys.stderr
    stdout, stderr = (streams.Watched(stream) for stream in before)
    sys.stdout, sys.stderr = cast(TextIO, stdout), cast(TextIO, stderr)
    try:
        code = _run(args, stdout)
    finally:
        sys.stdout, sys.stderr = before
    refused = stdout.settle()
    if isinstance(refused, BrokenPipeError):  # the reader of a pipe, such as `head`, has closed it
        code = streams.BROKEN_PIPE
    elif refused is not None:
        _say(f"nimble-jobs: standard output cannot be written: {refused.strerror}")
        code = code or 1
    stderr.settle()
    return code


def _say(text: str) -> None:
    with suppress(OSError):  # stderr cannot be written either, so the error is dropped
        note(text)


def _run(args: list[str], stdout: streams.Watched) -> int:
    debug = args[:1] == ["--debug"]
    command = _command()
    try:
        if _COMPLETE not in os.environ and (not args or _wants_help(args)):
            emit(_help(command, args))
            return 0
        code = command(args=args, prog_name="nimble-jobs", standalone_mode=False)
        sys.stdout.flush()
        return int(code or 0)
    except NimbleError as e:
        if debug:
            traceback.print_exc()
        with suppress(OSError):
            refusal(e)
        return e.exit_code
    except typer.TyperException as e:
        _say(_usage(e))
        return e.exit_code
    except typer.Abort:
        _say("nimble-jobs: aborted")
        return 1
    except (Exception, SystemExit) as e:  # last resort: users see a traceback only with --debug
        if stdout.refused is not None:  # then report that error
            return 1
        cause = e.__context__ if isinstance(e, SystemExit) else e  # Typer turns any broken pipe into an exit
        if cause is None:
            if isinstance(e, SystemExit) and isinstance(e.code, int | None):  # the shell got its completions
                return e.code or 0
            raise
        if debug:
            traceback.print_exc()
        said = " ".join(str(cause).split())
        _say(
            f"nimble-jobs: unexpected error: {type(cause).__name__}{': ' if said else ''}{said}; run again with --debug"
        )
        return 1


@functools.cache
def _command() -> Any:
    """All commands. Typer reads the signature of each anew, which takes longer than most commands."""
    command = typer.main.get_command(app)
    _keep_sentences(command)
    return command


def _keep_sentences(group: Any) -> None:
    """Let lists of commands show each first sentence whole. Typer cuts off what does not fit on the line."""
    for command in getattr(group, "commands", {}).values():
        words = " ".join((command.help or "").partition("\n\n")[0].split())
        command.short_help = words.partition(". ")[0].removesuffix(".") + "."
        _keep_sentences(command)


def _global_options_first(args: list[str]) -> list[str]:
    """Move `--debug` and `--home` to the front, from anywhere before a `--`."""
    debug: list[str] = []
    home: list[str] = []
    rest: list[str] = []
    words = iter(args)
    for word in words:
        if word == "--":
            rest += [word, *words]
        elif word == "--debug":
            debug = [word]
        elif word.startswith("--home="):
            home = [word]
        elif word == "--home":
            home = [word, *itertools.islice(words, 1)]
        else:
            rest.append(word)
    return debug + home + rest


def _wants_help(args: list[str]) -> bool:
    options = args[: args.index("--")] if "--" in args else args
    return any(word in ("-h", "--help") for word in options)


def _help(command: Any, args: list[str]) -> str:
    """The help of the named command. Typer's own way loads pydantic and takes twice the time."""
    context = typer.Context(command, info_name="nimble-jobs", **command.context_settings)
    for word in args:
        child = getattr(context.command, "commands", {}).get(word)
        if child is not None:
            context = typer.Context(child, info_name=word, parent=context)
    return context.get_help()


def _usage(error: typer.TyperException) -> str:
    """One line that names the command's --help; a bare group shows its help."""
    message = error.format_message()
    if "\n" in message:
        return message
    context = getattr(error, "ctx", None)
    hint = f" (see {context.command_path} --help)" if context else ""
    return f"nimble-jobs: {message.rstrip('.')}{hint}"


def leave(code: int) -> NoReturn:
    """End the process; at once if torch is loaded, because its threads and devices take long to shut down.

    Everything that a command must keep is durable by now, and the kernel frees the rest.
    """
    if "torch" not in sys.modules:
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # `main` has reported what could not be written
            stream.flush()
    os._exit(code)


def entry() -> NoReturn:
    """The program `nimble-jobs`."""
    leave(main())


if __name__ == "__main__":
    entry()
