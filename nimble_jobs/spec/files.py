"""Rules about files: inputs must exist, suffixes must fit, and the output folder must be apart from everything else."""

# ruff: noqa: PTH110, PTH112, PTH114 - os.path answers no where Path raises: a name too long, a closed folder

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Iterator
from os.path import exists, isdir, islink
from pathlib import Path

from nimble_jobs.addresses import fixed_part, is_address, problem_of_driver
from nimble_jobs.regular import NotRegular, check_regular
from nimble_jobs.sentence import is_folder
from nimble_jobs.sentence.sources import MODULES
from nimble_jobs.spec.findings import Finding
from nimble_jobs.spec.formats import SUFFIXES, InputFormat
from nimble_jobs.spec.model import JobSpec
from nimble_jobs.spec.paths import CHECKPOINT, WEIGHTS_SUFFIXES, Source, is_file_of_weights, parse_source
from nimble_jobs.spec.places import about_home, holds, is_or_contains
from nimble_jobs.spec.units import show

Known = Callable[[Iterable[str]], bool]


def check(spec: JobSpec, known: Known, *, base: Path, check_files: bool, home: Path | None = None) -> Iterator[Finding]:
    """Report what is wrong with the files that the spec names. `home`: the state folder, if known."""
    inputs = {field: source for field, source in sources(spec) if known((field,))}
    if known(("input.format",)):
        for field, path in inputs.items():
            yield from _suffix(field, path, spec.input.format)
    addresses = {field: inputs.pop(field) for field, source in list(inputs.items()) if is_address(source)}
    yield from _addresses(spec, known, addresses, check_files=check_files)
    made_earlier = bool(spec.run.after) or not known(("run.after",))
    source = parse_source(spec.model.source) if known(("model.source",)) else None
    if check_files:
        yield from _missing_source(source)
        if loss := _loss(spec, known):
            yield from _missing_file("train.loss", Path(loss.target))
        if not made_earlier:
            yield from _missing({**_expected(spec, inputs), **dict(_weights(spec, known))})
            yield from _missing_checkpoint(spec, known)
    if known(("output.path",)) and spec.output.address is None:
        yield from _apart(spec, known, {**inputs, **dict(_weights(spec, known))}, base, home)
        if check_files:
            yield from _output_place(spec.output.folder)


def _addresses(spec: JobSpec, known: Known, inputs: dict[str, str], *, check_files: bool) -> Iterator[Finding]:
    """Report addresses without a driver, and an output in an object store that lies inside one of these inputs."""
    output = spec.output.address if known(("output.path",)) else None
    around = [field for field, source in inputs.items() if f"{output}/".startswith(f"{fixed_part(source)}/")]
    if output is not None and around:
        yield Finding("output.path", f"lies inside {around[0]}", "a folder of its own")
        return
    for field, address in {**inputs, **({} if output is None else {"output.path": output})}.items():
        if check_files and (problem := problem_of_driver(address)):
            yield Finding(field, *problem)


def _apart(spec: JobSpec, known: Known, kept: dict[str, str], base: Path, home: Path | None) -> Iterator[Finding]:
    """Report an output folder that holds, or lies in, something else: these inputs and weights, and what follows."""
    source = parse_source(spec.model.source) if known(("model.source",)) else None
    if source and source.local:
        kept["model.source"] = source.target
    if loss := _loss(spec, known):
        kept["train.loss"] = loss.target
    if resume := _resume(spec, known):
        kept["train.resume"] = resume
    around = list(_output(spec.output.folder, kept, base))
    yield from around
    if home is not None and not around and (problem := about_home(spec.output.folder, home)):
        yield Finding("output.path", problem, "a folder of its own")


def sources(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """The fields that say where records come from, with what they say."""
    yield "input.source", spec.input.source
    if spec.train and spec.train.validation:
        yield "train.validation.source", spec.train.validation.source


def _expected(spec: JobSpec, inputs: dict[str, str]) -> dict[str, str]:
    """The inputs that must exist. With a template each tick has its own input. With `only_new` no file need match a
    glob yet, but its folder must exist.
    """
    if spec.cron is not None:
        inputs = {name: path for name, path in inputs.items() if "{{" not in path}
    if spec.input.only_new is None:
        return inputs
    return {
        name: _fixed_part(path) if glob.has_magic(path) and not exists(path) else path for name, path in inputs.items()
    }


def _weights(spec: JobSpec, known: Known) -> Iterator[tuple[str, str]]:
    weights = spec.model.weights
    if weights and is_file_of_weights(weights) and known(("model.weights",)):
        yield "model.weights", weights
    if spec.train and spec.train.init_from and known(("train.init_from",)):
        yield "train.init_from", spec.train.init_from


def _loss(spec: JobSpec, known: Known) -> Source | None:
    """The file of a custom loss."""
    if spec.train is None or not known(("train.loss",)) or ":" not in spec.train.loss:
        return None
    return parse_source(spec.train.loss)


def _resume(spec: JobSpec, known: Known) -> str | None:
    """The checkpoint that the training resumes from, if the spec names one."""
    named = spec.train is not None and known(("train.resume",)) and spec.train.resume not in ("auto", "never")
    return spec.train.resume if named and spec.train else None


def _missing_checkpoint(spec: JobSpec, known: Known) -> Iterator[Finding]:
    path = _resume(spec, known)
    if path is None or path.endswith(WEIGHTS_SUFFIXES):  # another rule reports these
        return
    yield from _missing_file("train.resume", Path(path) / CHECKPOINT, f"a folder with a {CHECKPOINT}, auto or never")


def _suffix(field: str, path: str, format_: InputFormat) -> Iterator[Finding]:
    """A suffix of another format is a mistake. The reader judges unknown suffixes."""
    suffix = Path(path).suffix.lower()
    if suffix in SUFFIXES[format_]:
        return
    owner = next((name for name, suffixes in SUFFIXES.items() if suffix in suffixes), format_)
    if owner != format_ and not isdir(path):
        yield Finding(field, f"{show(Path(path).name)} is not {format_}", f"{' or '.join(SUFFIXES[format_])}")


def _missing_source(source: Source | None) -> Iterator[Finding]:
    if source is None or not source.local:
        return
    path = Path(source.target)
    if source.scheme == "transformers":
        name = MODULES if is_folder(path) else "config.json"  # which may lie in a folder that modules.json names
        yield from _missing_file("model.source", path / name, "a folder with a config.json")
    else:
        yield from _missing_file("model.source", path)


def _missing_file(field: str, path: str | Path, expected: str = "an existing file") -> Iterator[Finding]:
    """Report a missing file, or one that could block its reader for ever, such as a pipe."""
    try:
        check_regular(path, os.stat(path).st_mode)  # noqa: PTH116 - as for the whole file
    except NotRegular as e:
        yield Finding(field, f"{path} is {e.kind}", "a regular file")
    except (OSError, ValueError):
        yield Finding(field, f"no file {path}", expected)


def _missing(paths: dict[str, str]) -> Iterator[Finding]:
    for field, path in paths.items():
        data = field.endswith("source")
        if data and glob.has_magic(path) and not exists(path):
            if next(glob.iglob(path, recursive=True), None) is None:  # noqa: PTH207 - Path.glob takes no absolute ones
                yield Finding(field, f"nothing matches {path}", "at least one file")
        elif data and not exists(path):
            yield Finding(
                field, f"no file or folder {path}", "one that exists, or run.after with the job that will write it"
            )
        elif not (data and isdir(path)):
            yield from _missing_file(field, path, "one that exists, or run.after with the job that will write it")


def _output(output: Path, kept: dict[str, str], base: Path) -> Iterator[Finding]:
    """Publishing may replace the whole folder, so it may not hold anything else of value, nor lie in the input."""
    places: dict[str, str | Path] = {
        "the root folder": "/",
        "the home folder": os.path.expanduser("~"),  # noqa: PTH111 - Path.home() raises where there is none
        "the spec's folder": base,
    }
    for name, place in places.items():
        if holds(output, place):
            yield Finding("output.path", f"{is_or_contains(output, place)} {name}", "a folder of its own")
            return
    for field, path in kept.items():
        if holds(output, _fixed_part(path)):
            yield Finding("output.path", f"{is_or_contains(output, path)} {field}", "a folder of its own")
        elif field.endswith("source") and holds(path, output):
            yield Finding("output.path", f"lies inside {field}", "a folder of its own")


def _output_place(output: Path) -> Iterator[Finding]:
    if islink(output):
        yield Finding("output.path", "is a symbolic link", "a folder")
    elif exists(output) and not isdir(output):
        yield Finding("output.path", "exists and is not a folder", "a folder")
    else:
        around = next((p for p in output.parents if exists(p)), Path("/"))
        if not isdir(around):
            yield Finding("output.path", f"{around} is not a folder", "a folder")


def _fixed_part(path: str) -> str:
    """The folders of a glob before its first special character; any other path as it is."""
    parts: list[str] = []
    for part in Path(path).parts:
        if glob.has_magic(part) and not exists(path):
            break
        parts.append(part)
    return str(Path(*parts))
