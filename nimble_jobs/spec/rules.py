"""Contradictions between fields that are valid by themselves, and capabilities that do not exist yet.

A rule names the fields that it reads. It is skipped if one of them is wrong already, so that users do not read about
consequences of one mistake. Rules about the file system are in `files.py`, rules about trainings in
`training_rules.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nimble_jobs.addresses import is_address
from nimble_jobs.spec import (
    batch_rules,
    device_rules,
    files,
    pooling_rules,
    text_rules,
    text_training_rules,
    timer_rules,
    training_rules,
)
from nimble_jobs.spec.findings import Finding, Rule, place, register
from nimble_jobs.spec.formats import COLUMNS, PICTURES, either
from nimble_jobs.spec.model import JobSpec
from nimble_jobs.spec.paths import is_file_of_weights, parse_source
from nimble_jobs.spec.tree import Tree, Where
from nimble_jobs.spec.units import show


@dataclass(frozen=True, slots=True, kw_only=True)
class NotYet:
    """A field whose capability does not exist yet, with the values that it may hold meanwhile."""

    field: str
    accepted: Callable[[JobSpec], bool]
    expected: str


NOT_YET = (
    NotYet(
        field="schedule.progressive",
        accepted=lambda s: s.kind == "score" or s.schedule.progressive is not True,
        expected="auto or false if kind is finetune",
    ),
    NotYet(
        field="input.fields.x",
        accepted=lambda s: s.kind == "score" or s.input.fields.arguments is None,
        expected="one array or column if kind is finetune",
    ),
)

RULES: list[Rule] = []
rule = register(RULES)


def check(
    spec: JobSpec,
    tree: Tree,
    *,
    base: Path,
    check_files: bool,
    home: Path | None = None,
    now: float,
    once: bool = False,
) -> None:
    """Report every contradiction, and every field whose capability does not exist yet, into the tree.

    `now`: Unix seconds, from which timers look ahead. With `once` a spec with `cron` is one of these contradictions.
    """

    def known(needs: Iterable[str]) -> bool:
        return not any(_spoils(bad, place(need)) for need in needs for bad in tree.bad)

    findings: list[Finding] = []
    for row in NOT_YET:
        if known((row.field, "kind")) and not row.accepted(spec):
            findings.append(Finding(row.field, "not supported yet", row.expected))
    for needs, rule_check in (
        *RULES,
        *training_rules.RULES,
        *device_rules.RULES,
        *pooling_rules.RULES,
        *batch_rules.RULES,
        *text_rules.RULES,
        *text_training_rules.RULES,
    ):
        if known(needs):
            findings += rule_check(spec)
    findings += timer_rules.check(spec, known, tree, now=now)
    if once and spec.cron is not None:
        findings.append(timer_rules.only_once(tree.origin(()).file))
    if check_files and known(("output", "input.format", "model.source")):
        findings += pooling_rules.check_files(spec)
    if check_files and known(("output", "input.fields.x", "input.format", "model.source", *batch_rules.PROMPTS)):
        findings += batch_rules.check_files(spec)
    if check_files and known(("model.source", "input.format", "input.text.tokenizer")):
        findings += text_rules.check_files(spec)
    findings += files.check(spec, known, base=base, check_files=check_files, home=home)
    for found in findings:
        at = None if found.at is None else place(found.at)
        tree.report(place(found.field, found.index), found.problem, found.expected, at=at)


def _spoils(bad: Where, need: Where) -> bool:
    """Whether a wrong value at `bad` makes a rule on `need` pointless: it is at that place, around it, or an item of
    it.
    """
    return need[: len(bad)] == bad or (bad[: len(need)] == need and isinstance(bad[len(need)], int))


@rule("output.fields", "input.fields.label")
def _output_fields(spec: JobSpec) -> Iterator[Finding]:
    fields = spec.output.fields
    for index, name in enumerate(fields):
        if name in fields[:index]:
            yield Finding("output.fields", f"{name} is given twice", "each field once", index=index)
        elif name == "label" and spec.input.fields.label is None:
            yield Finding("output.fields", "label needs input.fields.label, which is not given", "", index=index)


@rule("schedule.progressive", "schedule.on_miss")
def _progressive(spec: JobSpec) -> Iterator[Finding]:
    if spec.schedule.progressive is True and spec.schedule.on_miss != "build":
        problem = f"found true, but schedule.on_miss is {spec.schedule.on_miss}"
        yield Finding("schedule.progressive", problem, "auto, false, or on_miss: build")


@rule("input.fields.x", "input.fields.id", "input.fields.label", "input.format")
def _input_fields(spec: JobSpec) -> Iterator[Finding]:
    fields, format_ = spec.input.fields, spec.input.format
    given = {name: getattr(fields, name) for name in ("x", "id", "label") if getattr(fields, name) is not None}
    if fields.arguments is not None and format_ in ("images", "npy"):
        what = "the files are one input" if format_ == "images" else "the file holds one array"
        problem = f"found a mapping, but input.format is {format_}: {what}"
        yield Finding("input.fields.x", problem, f"none, or format {either(COLUMNS)}")
        return
    if format_ in ("images", "npy"):  # their records have no names
        names = {"id": "path", "label": "parent"} if format_ == "images" else {}
        for name, value in given.items():
            if name in fields.model_fields_set and value != names.get(name):
                expected = f"{names[name]}, or none" if name in names else "none"
                yield Finding(f"input.fields.{name}", f"found {show(value)}, but input.format is {format_}", expected)
        return
    for name in ("id", "label"):
        others = [c for n in ("x", "id") if n in given and n != name for c in _names(given[n])]
        if name in given and given[name] in others:
            yield Finding(f"input.fields.{name}", f"{show(given[name])} is given twice", "different arrays or columns")


def _names(value: str | dict[str, str] | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else () if isinstance(value, dict) else value


@rule("input.decode", "input.format", "run.device", "input.fields.x")
def _decode(spec: JobSpec) -> Iterator[Finding]:
    decode, format_ = spec.input.decode, spec.input.format
    if decode == "gpu" and spec.input.fields.arguments is not None:
        problem = "found gpu, but input.fields.x is a mapping, whose pictures the CPU decodes"
        yield Finding("input.decode", problem, "cpu or auto")
    elif decode != "auto" and format_ not in PICTURES:
        problem = f"found {decode}, but input.format is {format_}, which holds no pictures"
        yield Finding("input.decode", problem, "no decode")
    elif decode == "gpu" and spec.run.device == "cpu":
        yield Finding("input.decode", "found gpu, but run.device is cpu", "cpu or auto")


@rule("output.path", "kind", "input.only_new")
def _address(spec: JobSpec) -> Iterator[Finding]:
    if spec.output.address is None:
        return
    if spec.kind == "finetune":
        problem = "found an address, but a fine-tuning keeps its checkpoints beside its output"
        yield Finding("output.path", problem, "a local folder")
    elif spec.input.only_new is not None:
        problem = "found an address, but input.only_new keeps its list of files beside the output"
        yield Finding("output.path", problem, "a local folder, or no only_new")


@rule("input.source", "input.only_new", "train.validation.source", "run.gpus")
def _fetched(spec: JobSpec) -> Iterator[Finding]:
    """What does not work yet with inputs that a job fetches."""
    if spec.input.only_new is not None and is_address(spec.input.source):
        problem = "found an address, but input.only_new compares local files"
        yield Finding("input.source", problem, "a local folder, or no only_new")
    for field, source in files.sources(spec):
        if spec.kind == "finetune" and spec.run.gpus != 1 and is_address(source):
            yield Finding(field, "found an address, but run.gpus is not 1", "local files, or one GPU")


@rule("input.only_new", "kind")
def _only_new_kind(spec: JobSpec) -> Iterator[Finding]:
    if spec.input.only_new is not None and spec.kind == "finetune":
        problem = "not allowed if kind is finetune, which reads all records in every epoch"
        yield Finding("input.only_new", problem, "no only_new")


@rule("input.only_new", "output.if_exists", "kind")
def _only_new_output(spec: JobSpec) -> Iterator[Finding]:
    """Each run publishes new files only, so it must not remove the output of earlier runs."""
    if spec.input.only_new is None or spec.kind == "finetune":
        return
    if spec.output.if_exists == "replace":
        problem = "found replace, but with input.only_new it would remove the output of earlier runs"
        yield Finding("output.if_exists", problem, "fail, and a different output.path for each run")
    elif spec.output.if_exists == "resume":
        problem = "found resume, but with input.only_new no two runs score the same files"
        yield Finding("output.if_exists", problem, "fail")


@rule("input.transform.mean", "input.transform.std", "input.transform.channels", "input.format")
def _channels(spec: JobSpec) -> Iterator[Finding]:
    transform = spec.input.transform
    mean, std = transform.mean, transform.std
    if mean is not None and std is None:
        yield Finding("input.transform.std", "missing", "one number for each number in mean", at="input.transform.mean")
    if std is not None and mean is None:
        yield Finding("input.transform.mean", "missing", "one number for each number in std", at="input.transform.std")
    if mean is not None and std is not None and len(mean) != len(std):
        yield Finding("input.transform.std", f"found {len(std)} numbers", f"{len(mean)}, as in mean")
    channels = transform.channels or (3 if spec.input.format == "images" else None)
    for name, numbers in (("mean", mean), ("std", std)):
        if channels and numbers and len(numbers) not in (1, channels):
            expected = "1" if channels == 1 else f"1 or {channels} (one per channel)"
            yield Finding(f"input.transform.{name}", f"found {len(numbers)} numbers", expected)


@rule("input.transform.resize", "input.transform.center_crop")
def _sizes(spec: JobSpec) -> Iterator[Finding]:
    resize, crop = spec.input.transform.resize, spec.input.transform.center_crop
    if resize and crop and (crop[0] > resize[0] or crop[1] > resize[1]):
        yield Finding("input.transform.center_crop", "larger than resize", "at most its size")


@rule("input.transform.resize", "input.transform.center_crop", "input.transform.shortest_edge")
def _shortest_edge(spec: JobSpec) -> Iterator[Finding]:
    transform = spec.input.transform
    edge, crop = transform.shortest_edge, transform.center_crop
    if edge is None:
        return
    if transform.resize is not None:
        yield Finding("input.transform.shortest_edge", "resize is given, too", "one of the two")
    if crop is None:
        problem = "missing, so the size of a picture would depend on its shape"
        expected = "the size that all pictures get"
        yield Finding("input.transform.center_crop", problem, expected, at="input.transform.shortest_edge")
    elif max(crop) > edge:
        yield Finding("input.transform.center_crop", "larger than shortest_edge", "at most its size")


@rule("input.transform.layout", "input.format")
def _layout(spec: JobSpec) -> Iterator[Finding]:
    if spec.input.format == "images" and spec.input.transform.layout is not None:
        yield Finding("input.transform.layout", "not allowed if input.format is images", "no layout")


@rule("model.source", "model.weights")
def _weights(spec: JobSpec) -> Iterator[Finding]:
    weights, scheme = spec.model.weights, parse_source(spec.model.source).scheme
    if weights is not None and not is_file_of_weights(weights) and scheme != "torchvision":
        expected = "a .safetensors, .pt or .pth file, because model.source is not torchvision"
        yield Finding("model.weights", f"found {show(weights)}", expected)


@rule("model.source", "model.args", "kind")
def _exported(spec: JobSpec) -> Iterator[Finding]:
    if parse_source(spec.model.source).scheme == "exported":
        if spec.model.args:
            yield Finding("model.args", "not allowed for an exported program", "no args")
        if spec.kind == "finetune":
            yield Finding("model.source", "an exported program cannot be trained", "another source")


@rule("name", "run.after")
def _after(spec: JobSpec) -> Iterator[Finding]:
    parents = [item if isinstance(item, str) else item.job for item in spec.run.after]
    for index, parent in enumerate(parents):
        if parent == spec.name:
            yield Finding("run.after", "names the job itself", "other jobs", index=index)
        elif parent in parents[:index]:
            yield Finding("run.after", f"{parent} is given twice", "each job once", index=index)


@rule("notify.on")
def _notify(spec: JobSpec) -> Iterator[Finding]:
    if spec.notify is not None:
        for index, event in enumerate(spec.notify.on):
            if event in spec.notify.on[:index]:
                yield Finding("notify.on", f"{event} is given twice", "each event once", index=index)


@rule("schedule.budget")
def _budget(spec: JobSpec) -> Iterator[Finding]:
    if spec.schedule.budget == 0:
        yield Finding("schedule.budget", "found 0", "more than 0")


@rule("run.timeout")
def _timeout(spec: JobSpec) -> Iterator[Finding]:
    if spec.run.timeout == 0:
        yield Finding("run.timeout", "found 0", "more than 0")


@rule("run.retry.initial", "run.retry.max")
def _retry(spec: JobSpec) -> Iterator[Finding]:
    retry = spec.run.retry
    if retry.max < retry.initial:
        yield Finding("run.retry.max", "less than run.retry.initial", "at least as long", at="run.retry")
