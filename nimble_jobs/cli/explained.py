"""How `explain` shows a schedule."""

from __future__ import annotations

from typing import Any

from nimble_jobs.cli import render
from nimble_jobs.views import figures

_HITS = {"stored": "stored hit", "miss": "miss"}


def explained(answer: dict[str, Any]) -> list[render.Section]:
    """Panels for the answer of `planner.explain_schedule`; fewer panels for a miss that was not built."""
    parts: list[render.Section] = [("Schedule", _head(answer))]
    if "buckets" in answer:
        parts.append(("Buckets", [(f"{b['length']:,} tokens", _bucket(b)) for b in answer["buckets"]]))
    if "graph" in answer:
        parts += [
            ("Stages", _stages(answer["stages"])),
            ("Graph", _graph(answer["graph"])),
            ("Bounds", _bounds(answer)),
            ("Memory", _memory(answer["memory"])),
            *render.candidates(answer["candidates"]),
            *render.choices(answer["choices"]),
        ]
    if "accumulate" in answer:
        parts += _accumulating(answer["accumulate"])
    return [*parts, ("Key", figures.flat(answer["key_parts"]))]


def _bucket(bucket: dict[str, Any]) -> str:
    """One of the schedules for texts."""
    share = None if bucket["share"] is None else f"{bucket['share']:.1%} of the texts"
    words = [f"{bucket['batch']:,} in a batch", *([share] if share else []), _HITS[bucket["hit"]]]
    if bucket["replay_us"] is not None:
        words.append(f"a replay takes {figures.micros(bucket['replay_us'])}")
    return ", ".join([*words, bucket["key"][:12]]) + (f": {bucket['fallback']}" if bucket["fallback"] else "")


def _accumulating(answer: dict[str, Any]) -> list[render.Section]:
    """What differs in a step's batches that do not update the weights."""
    head = _head(answer)
    if "graph" in answer:
        head += [*_graph(answer["graph"]), *_bounds(answer), *_memory(answer["memory"])]
    return [("Batches without an update", head)]


def _head(answer: dict[str, Any]) -> list[tuple[str, str]]:
    reason = answer["miss_reason"]
    lines = [
        ("key", answer["key"][:16]),  # enough for `cache show`
        ("answer", _HITS[answer["hit"]] + (f": {reason}" if reason else "")),
        ("fallback", answer["fallback"]),
        ("first run", _first_run(answer.get("first_run") or {})),
        ("speed", figures.speedup(answer)),
    ]
    if answer.get("taken_from"):
        taken = answer["taken_from"]
        lines.append(("choice", f"taken over from that of {taken['batch']} ({taken['key'][:12]}); see Candidates"))
    if "graph" in answer:
        folded = f", {answer['folded']:,} normalisations folded" if answer["folded"] else ""
        merged = f", {answer['merged']:,} linear layers merged" if answer["merged"] else ""
        error = "not finite" if answer["error"] is None else f"{answer['error']:.2g}"
        lines += [
            ("kernels", f"{answer['kernels']}, layout {answer['layout']}{folded}{merged}"),
            ("in flight", f"{answer['in_flight']:,}"),
            ("error", f"{error} against eager, tolerance {answer['tolerance']:.2g}"),
        ]
    lines.append(("switched off", ", ".join(answer["switched_off"])))
    return [(name, text) for name, text in lines if text]


def _first_run(answer: dict[str, Any]) -> str | None:
    """What a job decides that finds no schedule: asked of a stored one, too."""
    why = answer.get("why")
    return f"a job that finds no stored schedule {why}" if answer.get("plan") else why


def _stages(stages: dict[str, float | None]) -> list[tuple[str, str]]:
    """Loading first, then the stages of the build. They do not add up to it, because eager is measured too."""
    return [(n.removesuffix("_s"), figures.duration(s)) for n, s in stages.items() if s is not None]


def _graph(graph: dict[str, Any]) -> list[tuple[str, str]]:
    exact = "" if graph["width_exact"] else "at most "
    return [
        ("tasks", f"{graph['tasks']:,}"),
        ("edges", f"{graph['meg_edges']:,} in the minimum equivalent graph, {graph['matching']:,} matched"),
        ("width", f"{exact}{graph['width']:,}"),
        ("streams", f"{graph['streams']:,}"),
        ("syncs", f"{graph['syncs_needed']:,} needed for full concurrency, {graph['syncs_used']:,} used"),
    ]


def _bounds(answer: dict[str, Any]) -> list[tuple[str, str]]:
    """How near a replay is to the bounds that hold for any schedule of these tasks."""
    graph, replay = answer["graph"], figures.micros(answer["replay_us"])
    if graph["critical_path_us"]:
        replay += f", {answer['replay_us'] / graph['critical_path_us']:.2f}× the critical path"
    return [
        ("critical path", figures.micros(graph["critical_path_us"])),
        ("all work", figures.micros(graph["total_work_us"])),
        ("replay", replay),
    ]


def _memory(memory: dict[str, int]) -> list[tuple[str, str]]:
    arena = f"{figures.size(memory['arena_without_reuse_bytes'])} without reuse"
    floor = f"{figures.size(memory['arena_floor_bytes'])} is the least on one stream"
    return [
        ("peak", figures.size(memory["peak_bytes"])),
        ("arena", f"{figures.size(memory['arena_bytes'])}; {arena}, {floor}"),
    ]
