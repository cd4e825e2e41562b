"""Reads a spec file and overrides into a `JobSpec`, or reports all problems with lines; `JobSpec` to JSON and back."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nimble_jobs.errors import Problem, SpecError
from nimble_jobs.regular import NotRegular, open_regular
from nimble_jobs.spec import files, rules
from nimble_jobs.spec import overrides as override
from nimble_jobs.spec.model import JobSpec
from nimble_jobs.spec.places import about_home
from nimble_jobs.spec.tree import MAX_BYTES, Tree, parse
from nimble_jobs.spec.units import show
from nimble_jobs.spec.validate import validate

STDIN = "-"  # in the place of a file
_STDIN_NAME = "<stdin>"


def load(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    check_files: bool = True,
    home: Path | None = None,
    now: float | None = None,
    once: bool = False,
) -> JobSpec:
    """Read a spec file, or standard input if `path` is `-`. Relative paths, also in overrides, are relative to the
    folder of the file, or to the current folder.

    With `check_files` the files that the spec names must exist, unless earlier jobs (`run.after`) may still make them.
    With `home`, the state folder, the output must be apart from it. With `once`, the spec may have no `cron`. `now`,
    in Unix seconds, is when a timer begins to look ahead (None: now). Raises SpecError with all problems.
    """
    return loads(
        read(path),
        name_of(path),
        base_of(path),
        overrides,
        check_files=check_files,
        home=home,
        now=now,
        once=once,
    )


def read(path: Path, limit_bytes: int = MAX_BYTES, expected: str = "a job spec in YAML") -> bytes:
    """The bytes of a file, or of standard input. Raises SpecError if it cannot be read or exceeds the limit."""
    file = name_of(path)
    if str(path) == STDIN:
        return _standard_input(limit_bytes, expected)
    try:
        with open_regular(path) as stream:
            source: bytes = stream.read(limit_bytes + 1)
    except FileNotFoundError:
        raise _unreadable(file, "no such file", expected) from None
    except NotRegular as e:
        raise _unreadable(file, e.kind, expected) from None
    except (OSError, ValueError) as e:  # ValueError: a NUL byte in the name
        reason = e.strerror if isinstance(e, OSError) else None
        raise _unreadable(file, f"cannot be read ({reason or e})", expected) from e
    if len(source) > limit_bytes:
        raise _unreadable(file, _too_large(limit_bytes), expected)
    return source


def base_of(path: Path) -> Path:
    """The folder that relative paths of the spec at `path` are relative to."""
    if str(path) == STDIN:
        return Path.cwd()
    return Path(os.path.abspath(path)).parent  # noqa: PTH100 - resolve() would follow symlinks


def name_of(path: Path) -> str:
    """The name of the spec at `path` in messages."""
    return _STDIN_NAME if str(path) == STDIN else str(path)


def loads(
    text: str | bytes,
    file: str,
    base: Path,
    overrides: Sequence[str] = (),
    *,
    check_files: bool = True,
    home: Path | None = None,
    now: float | None = None,
    once: bool = False,
) -> JobSpec:
    """Read a spec from text. `file` is the name in messages; relative paths are relative to the absolute folder `base`.

    Raises SpecError with all problems, sorted by line, with overrides last.
    """
    return spec_of(parse(text, file), base, overrides, check_files=check_files, home=home, now=now, once=once)


def spec_of(
    tree: Tree,
    base: Path,
    overrides: Sequence[str] = (),
    *,
    fill: Callable[[Tree], None] = lambda _tree: None,
    check_files: bool = True,
    home: Path | None = None,
    now: float | None = None,
    once: bool = False,
) -> JobSpec:
    """As `loads`, for a parsed document. `fill` may change the tree before its values are checked."""
    file = tree.origin(()).file
    if () not in tree.bad and not isinstance(tree.value, dict):
        empty = tree.value is None
        tree.report((), "the document is empty" if empty else f"found {show(tree.value)}", "a mapping of fields")
        tree.bad.add(())
    if () not in tree.bad:
        for assignment in overrides:
            override.apply(tree, assignment)
        fill(tree)
        spec = validate(tree, JobSpec, base)
        if spec is not None:
            at = time.time() if now is None else now
            rules.check(spec, tree, base=base, check_files=check_files, home=home, now=at, once=once)
            if not tree.problems:
                return spec
    raise SpecError(sorted(tree.problems, key=lambda p: (p.file != file, p.line)))


def check_files(spec: JobSpec, *, file: str, base: Path, home: Path) -> None:
    """Check the files of a spec again, as `load` does. `file` is the name in messages.

    Raises SpecError for missing files, and for an output folder that is not apart from other files.
    """
    findings = files.check(spec, lambda _fields: True, base=base, check_files=True, home=home)
    problems = [Problem(file=file, line=0, field=f.field, problem=f.problem, expected=f.expected) for f in findings]
    if problems:
        raise SpecError(problems)


def check_home(spec: JobSpec, home: Path) -> None:
    """Raises SpecError for an output path in or around the state folder."""
    problem = None if spec.output.address is not None else about_home(spec.output.folder, home)
    if problem is not None:
        issue = Problem(
            file=f"job {spec.name}", line=0, field="output.path", problem=problem, expected="a folder of its own"
        )
        raise SpecError([issue])


def dump(spec: JobSpec) -> dict[str, Any]:
    """The spec as JSON-able values, every field given, durations in seconds."""
    return spec.model_dump(mode="json")


def restore(stored: dict[str, Any]) -> JobSpec:
    """Inverse of `dump`. Checks neither files nor contradictions. Raises SpecError."""
    try:
        return JobSpec.model_validate_json(json.dumps(stored))
    except (ValidationError, TypeError, ValueError) as e:
        problem = f"not a stored spec: {' '.join(str(e).split())[:200]}"
        raise SpecError([Problem(file="stored spec", line=0, field="", problem=problem)]) from e


def digest(spec: JobSpec) -> str:
    """SHA-256, in hex, of the canonical JSON of `dump(spec)`: equal for specs that mean the same."""
    text = json.dumps(dump(spec), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _standard_input(limit_bytes: int, expected: str) -> bytes:
    """The bytes of standard input. Raises SpecError if it is closed or exceeds the limit."""
    try:
        source: bytes = sys.stdin.buffer.read(limit_bytes + 1)
    except (AttributeError, OSError, ValueError) as e:  # None, or closed
        raise _unreadable(
            _STDIN_NAME, f"cannot be read ({getattr(e, 'strerror', None) or 'it is closed'})", expected
        ) from e
    if len(source) > limit_bytes:
        raise _unreadable(_STDIN_NAME, _too_large(limit_bytes), expected)
    return source


def _too_large(limit_bytes: int) -> str:
    return f"larger than {limit_bytes >> 20:,} MiB"


def _unreadable(file: str, problem: str, expected: str) -> SpecError:
    return SpecError([Problem(file=file, line=0, field="", problem=problem, expected=expected)])
