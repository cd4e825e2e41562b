"""Several specs at once: one per line of a file, or one for each combination of a grid's values."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from nimble_jobs.errors import Problem, SpecError
from nimble_jobs.spec.grid import Combination
from nimble_jobs.spec.load import base_of, name_of, read, spec_of
from nimble_jobs.spec.model import JobSpec
from nimble_jobs.spec.tree import MAX_BYTES, Origin, Tree, parse
from nimble_jobs.spec.units import show

MOST_JOBS = 100_000
_MOST_BYTES = 1 << 30  # specs in a file
_MOST_PROBLEMS = 100  # problems of a file that are listed
_LINES = "one JSON spec per line"
_FIELDS = (("name",), ("output", "path"), ("run", "key"))  # fields that may hold placeholders
_PLACEHOLDER = re.compile(r"\{\{\s*(index|grid:\s*[^{}]*?)\s*\}\}")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """A spec and its origin."""

    file: str
    line: int = 0  # 0 if there is no line
    spec: JobSpec

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"{self.file}:{self.line}" if self.line else self.file


def load_lines(
    path: Path, overrides: Sequence[str] = (), *, check_files: bool = True, home: Path | None = None
) -> list[JobSpec]:
    """The specs of a file with one JSON object per line; empty lines are skipped.

    `{{ index }}` in `name`, `output.path` or `run.key` is the spec's place among them, from 0. Other arguments as for
    `load`; overrides hold for each line. Raises SpecError with the problems of all lines.
    """
    file, base = name_of(path), base_of(path)
    lines = read(path, _MOST_BYTES, _LINES).split(b"\n")
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not 1 <= len(numbered) <= MOST_JOBS:
        raise _refused(file, f"found {len(numbered):,} specs", f"from 1 to {MOST_JOBS:,}, one JSON spec per line")
    specs: list[Labelled] = []
    problems: list[Problem] = []
    for index, (number, line) in enumerate(numbered):
        try:
            spec = spec_of(
                _parse_line(line, file, number),
                base,
                overrides,
                fill=_filler({"index": str(index)}),
                check_files=check_files,
                home=home,
                once=True,
            )
        except SpecError as e:
            problems += e.problems
        else:
            specs.append(Labelled(file=file, line=number, spec=spec))
    _raise(problems, file)
    check_outputs(specs, hint="{{ index }}")
    return [each.spec for each in specs]


def load_grid(
    path: Path,
    grid: Sequence[Combination],
    overrides: Sequence[str] = (),
    *,
    check_files: bool = True,
    home: Path | None = None,
) -> list[JobSpec]:
    """The spec of a file, once for each combination, whose values go before `overrides`.

    `{{ grid:KEY }}` in `name`, `output.path` or `run.key` is the value of KEY, fit for a file's name, and `{{ index }}`
    the place of the combination, from 0. Raises SpecError with all problems, each once.
    """
    file, base = name_of(path), base_of(path)
    parsed = parse(read(path), file)
    specs: list[Labelled] = []
    problems: dict[Problem, None] = {}
    for index, combination in enumerate(grid):
        values = {f"grid:{key}": _safe(text) for key, text in combination} | {"index": str(index)}
        try:
            spec = spec_of(
                copy.deepcopy(parsed),
                base,
                (*overrides, *(f"{key}={text}" for key, text in combination)),
                fill=_filler(values),
                check_files=check_files,
                home=home,
                once=True,
            )
        except SpecError as e:
            problems |= dict.fromkeys(e.problems)
        else:
            specs.append(Labelled(file=f"{file} with {' '.join(f'{k}={v}' for k, v in combination)}", spec=spec))
    _raise(list(problems), file)
    check_outputs(specs, hint=" ".join("{{ grid:" + key + " }}" for key, _ in grid[0]))
    return [each.spec for each in specs]


def _parts(spec: JobSpec) -> PurePath:
    """The output's path or address, to be compared with others."""
    return PurePath(spec.output.path)


def check_outputs(specs: Sequence[Labelled], *, hint: str = "") -> None:
    """Raises SpecError if the output folders of two specs are the same, or one lies in the other."""
    by_path: dict[PurePath, Labelled] = {}
    problems: list[Problem] = []
    expected = "a folder of its own" + (f", for instance with {hint} in the path" if hint else "")
    for each in sorted(specs, key=lambda each: len(_parts(each.spec).parts)):
        path = _parts(each.spec)
        around = next((folder for folder in (path, *path.parents) if folder in by_path), None)
        if around is None:
            by_path[path] = each
            continue
        how = "is" if around == path else "lies in"
        problem = f"{each.spec.output.path} {how} the output of {by_path[around].label} too"
        problems.append(
            Problem(file=each.file, line=each.line, field="output.path", problem=problem, expected=expected)
        )
    if problems:
        _raise(problems, problems[0].file)


def _parse_line(line: bytes, file: str, number: int) -> Tree:
    """One line of JSON, as strictly as YAML is read: no key twice, no number that is none. All of it has one line."""
    tree = Tree(origins={(): Origin(file, number)})
    try:
        if len(line) > MAX_BYTES:
            raise ValueError(f"found {len(line):,} bytes; expected at most 1 MiB")
        json.loads(line, object_pairs_hook=_without_twins, parse_constant=_no_constant)
    except RecursionError:
        tree.report((), "nested too deeply", "a spec as one JSON object")
        tree.bad.add(())
        return tree
    except ValueError as e:
        text = f"{e.msg} at column {e.colno}" if isinstance(e, json.JSONDecodeError) else str(e)
        tree.report((), f"not valid JSON: {text}", "a spec as one JSON object")
        tree.bad.add(())
        return tree
    return parse(line, file, line=number)  # JSON is YAML; its values are read by the same rules


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in pairs:
        if key in fields:
            raise ValueError(f"{show(key)} is given twice")
        fields[key] = value
    return fields


def _no_constant(text: str) -> Any:
    raise ValueError(f"found {text}")


def _filler(values: Mapping[str, str]) -> Callable[[Tree], None]:
    """Replaces placeholders by their values, and reports unknown ones."""

    def fill(tree: Tree) -> None:
        for where in _FIELDS:
            *parents, last = where
            target = tree.value
            for part in parents:
                target = target.get(part) if isinstance(target, dict) else None
            text = target.get(last) if isinstance(target, dict) else None
            if not isinstance(text, str):
                continue
            named = [_name(name) for name in _PLACEHOLDER.findall(text)]
            if unknown := [name for name in named if name not in values]:
                expected = " or ".join("{{ " + name + " }}" for name in values)
                tree.report(where, f"found {{{{ {unknown[0]} }}}}", expected)
                tree.bad.add(where)
                continue
            target[last] = _PLACEHOLDER.sub(lambda match: values[_name(match[1])], text)

    return fill


def _name(text: str) -> str:
    return re.sub(r":\s+", ":", text)


def _safe(text: str) -> str:
    """A value as a part of a file's name: `torchvision:resnet18` as `torchvision-resnet18`."""
    return _UNSAFE.sub("-", text.strip("\"' ")).strip("-.") or "empty"


def _raise(problems: list[Problem], file: str) -> None:
    if len(problems) > _MOST_PROBLEMS:
        more = f"{len(problems) - _MOST_PROBLEMS:,} more problems"
        problems = [*problems[:_MOST_PROBLEMS], Problem(file=file, line=0, field="", problem=more)]
    if problems:
        raise SpecError(problems)


def _refused(file: str, problem: str, expected: str) -> SpecError:
    return SpecError([Problem(file=file, line=0, field="", problem=problem, expected=expected)])
