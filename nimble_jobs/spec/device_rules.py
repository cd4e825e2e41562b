"""Contradictions about jobs that several devices work on."""

from __future__ import annotations

from collections.abc import Iterator

from nimble_jobs.spec.findings import Finding, Rule, register
from nimble_jobs.spec.formats import TEXTS
from nimble_jobs.spec.model import JobSpec

SHARE = 4  # records of a batch that each device of a training takes, at least

RULES: list[Rule] = []
rule = register(RULES)


def _several(spec: JobSpec) -> bool:
    return spec.run.gpus == "all" or spec.run.gpus > 1


@rule("run.gpus", "kind")
def _kind(spec: JobSpec) -> Iterator[Finding]:
    if spec.run.gpus == "all" and spec.kind == "finetune":
        problem = "found all, but kind is finetune: how a training divides its batches must not depend on what is free"
        yield Finding("run.gpus", problem, "a whole number")


@rule("run.gpus", "input.batch_size", "kind")
def _shares(spec: JobSpec) -> Iterator[Finding]:
    gpus, size = spec.run.gpus, spec.input.batch_size
    if gpus == "all" or gpus == 1 or spec.kind != "finetune" or spec.input.format in TEXTS:
        return
    if size % gpus or size < SHARE * gpus:
        problem = f"found {gpus}, but input.batch_size is {size}: each device takes an equal share, of at least {SHARE}"
        yield Finding("run.gpus", problem, _shareable(size))


def _shareable(size: int) -> str:
    """How many devices can share batches of this size."""
    most = next((count for count in range(size // SHARE, 1, -1) if size % count == 0), 1)
    return f"a divisor of {size} that is at most {most}" if most > 1 else "1, or another input.batch_size"


@rule("run.gpus", "run.device")
def _device(spec: JobSpec) -> Iterator[Finding]:
    if _several(spec) and ":" in spec.run.device:
        problem = f"found {spec.run.gpus}, but run.device is {spec.run.device}, which is one device"
        yield Finding("run.gpus", problem, "1, or run.device: auto, cpu or cuda")


@rule("run.gpus", "kind", "input.format")
def _format(spec: JobSpec) -> Iterator[Finding]:
    if _several(spec) and spec.kind == "finetune" and spec.input.format in TEXTS:
        problem = f"found {spec.run.gpus}, which is not supported yet for trainings on texts"
        yield Finding("run.gpus", problem, "1")


@rule("run.gpus", "run.max_failed_shards")
def _max_failed_shards(spec: JobSpec) -> Iterator[Finding]:
    if spec.run.max_failed_shards and spec.kind == "finetune":
        yield Finding("run.max_failed_shards", f"found {spec.run.max_failed_shards}, but kind is finetune", "0")
    elif spec.run.max_failed_shards and not _several(spec):
        problem = (
            f"found {spec.run.max_failed_shards}, but run.gpus is 1: shards fail alone only if several devices score"
        )
        yield Finding("run.max_failed_shards", problem, "0, or more than one in run.gpus")
