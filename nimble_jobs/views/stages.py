"""How busy the stages of a job are, which one is the bottleneck, and what would help."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from nimble_jobs.job import Job
from nimble_jobs.plural import count
from nimble_jobs.views.jobs import NOT_BUILT, schedule_state

_IDLE = 0.5  # a less busy stage is no bottleneck

_BATCH = "a larger input.batch_size"
_COMPUTE = (_BATCH, "model.dtype fp16 or bf16", "a faster device")
_HELP: dict[str, tuple[str, ...]] = {
    "read and decode": ("more CPU cores or a faster disk",),
    "read": ("a faster disk", "more CPU cores"),
    "decode": ("pictures stored at a smaller size",),
    "upload": ("fewer bytes a record: uint8 instead of float32, or smaller records",),
    "tokenise": ("more CPU cores",),
    "replay": _COMPUTE,
    "step": _COMPUTE,
    "download": ("fewer output.fields: logits and embeddings are large",),
    "columns": ("fewer output.fields", _BATCH),
    "cuts": ("fewer output.fields",),
    "shards": ("a faster disk", "a larger output.shard_size"),
}


def without(timings: dict[str, Any]) -> dict[str, Any]:
    """Timings without the stages."""
    return {name: value for name, value in timings.items() if name not in ("stages", "bottleneck", "phases")}


def of_job(job: Job) -> list[tuple[str, str]]:
    """The stages of a job, with advice that it can follow."""
    more: dict[str, tuple[str, ...]] = {}
    unbuilt = schedule_state(job).startswith(NOT_BUILT) or job.spec.get("schedule", {}).get("on_miss") == "eager"
    if unbuilt:  # other jobs in eager have models that cannot be recorded
        more["replay"] = ("a stored schedule (nimble-jobs cache build)",)
    names = [stage["name"] for stage in job.timings.get("stages") or []]
    on_gpu = "download" in names or job.device.startswith("cuda")
    if on_gpu and job.spec.get("input", {}).get("decode") == "cpu":
        more["read and decode"] = ("input.decode: gpu",)
    return lines(job.timings, more)


def lines(timings: dict[str, Any], more: Mapping[str, tuple[str, ...]] = MappingProxyType({})) -> list[tuple[str, str]]:
    """A line for each stage, and one for the bottleneck; none if nothing was measured.

    `more` is what would help a stage, by its name, before what always helps.
    """
    stages = timings.get("stages") or []
    if not stages:
        return []
    rows = [(str(stage["name"]), _stage(stage)) for stage in stages]
    busiest = max(stages, key=lambda stage: stage["busy"])
    if busiest["busy"] < _IDLE:
        text = f"none: each stage is idle most of the time ({busiest['name']}: {busiest['busy']:.0%} busy)"
    else:
        text = f"{busiest['name']}: {busiest['busy']:.0%} busy; {_workers(busiest)}"
        # Batches of texts are counted in tokens, and large enough.
        name = busiest["name"]
        helps = [*more.get(name, ()), *(h for h in _HELP.get(name, ()) if h != _BATCH or "text" not in timings)]
        if helps:
            text += f". What would help: {_or(helps)}"
    return [*rows, ("bottleneck", text)]


def _or(ways: list[str]) -> str:
    *others, last = ways
    return f"{', '.join(others)}, or {last}" if others else last


def _stage(stage: dict[str, Any]) -> str:
    text = f"{stage['busy']:>4.0%} busy, {_workers(stage)}"
    if stage["limit"]:
        text += f", {stage['depth']:.1f} of at most {stage['limit']} results wait for the next stage"
    return text


def _workers(stage: dict[str, Any]) -> str:
    return count(stage["workers"], stage["unit"])
