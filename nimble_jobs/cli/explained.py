"""How `explain` shows a schedule."""

from __future__ import annotations

from typing import Any

from nimble_jobs.cli import render

_HITS = {"stored": "stored hit", "miss": "miss"}


def explained(found: dict[str, Any]) -> list[render.Section]:
    """Panels for the answer of `planner.explain_schedule`; fewer panels for a miss that was not built."""
    parts: list[render.Section] = [("Schedule", _head(found))]
    if "graph" in found:
        parts += [
            ("Stages", _stages(found["stages"])),
            ("Graph", _graph(found["graph"])),
            ("Bounds", _bounds(found)),
            ("Memory", _memory(found["memory"])),
            *render.candidates(found["candidates"]),
        ]
    if "accumulate" in found:
        parts += _accumulating(found["accumulate"])
    return [*parts, ("Key", render.flat(found["key_parts"]))]


def _accumulating(found: dict[str, Any]) -> list[render.Section]:
    """What differs in a step's batches that do not update the weights."""
    head = _head(found)
    if "graph" in found:
        head += [*_graph(found["graph"]), *_bounds(found), *_memory(found["memory"])]
    return [("Batches without an update", head)]


def _head(found: dict[str, Any]) -> list[tuple[str, str]]:
    reason = found["miss_reason"]
    lines = [
        ("key", found["key"][:16]),  # enough for `cache show`
        ("answer", _HITS[found["hit"]] + (f": {reason}" if reason else "")),
        ("fallback", found["fallback"]),
        ("first run", _first_run(found.get("first_run") or {})),
        ("speed", render.speedup(found)),
    ]
    if "graph" in found:
        folded = f", {found['folded']:,} normalisations folded" if found["folded"] else ""
        merged = f", {found['merged']:,} linear layers merged" if found["merged"] else ""
        error = "not finite" if found["error"] is None else f"{found['error']:.2g}"
        lines += [
            ("kernels", f"{found['kernels']}, layout {found['layout']}{folded}{merged}"),
            ("in flight", f"{found['in_flight']:,}"),
            ("error", f"{error} against eager, tolerance {found['tolerance']:.2g}"),
        ]
    return [(name, text) for name, text in lines if text]


def _first_run(found: dict[str, Any]) -> str | None:
    """What a job decides that finds no schedule: asked of a stored one, too."""
    why = found.get("why")
    return f"a job that found none stored: {why}" if found.get("plan") else why


def _stages(stages: dict[str, float | None]) -> list[tuple[str, str]]:
    """Loading first, then the stages of the build. They do not add up to it, because eager is measured too."""
    return [(n.removesuffix("_s"), render.duration(s)) for n, s in stages.items() if s is not None]


def _graph(graph: dict[str, Any]) -> list[tuple[str, str]]:
    exact = "" if graph["width_exact"] else "at most "
    return [
        ("tasks", f"{graph['tasks']:,}"),
        ("edges", f"{graph['meg_edges']:,} in the minimum equivalent graph, {graph['matching']:,} matched"),
        ("width", f"{exact}{graph['width']:,}"),
        ("streams", f"{graph['streams']:,}"),
        ("syncs", f"{graph['syncs_needed']:,} needed for full concurrency, {graph['syncs_used']:,} used"),
    ]


def _bounds(found: dict[str, Any]) -> list[tuple[str, str]]:
    """How near a replay is to the bounds that hold for any schedule of these tasks."""
    graph, replay = found["graph"], render.micros(found["replay_us"])
    if graph["critical_path_us"]:
        replay += f", {found['replay_us'] / graph['critical_path_us']:.2f}× the critical path"
    return [
        ("critical path", render.micros(graph["critical_path_us"])),
        ("all work", render.micros(graph["total_work_us"])),
        ("replay", replay),
    ]


def _memory(memory: dict[str, int]) -> list[tuple[str, str]]:
    arena = f"{render.size(memory['arena_without_reuse_bytes'])} without reuse"
    floor = f"{render.size(memory['arena_floor_bytes'])} at least on one stream"
    return [
        ("peak", render.size(memory["peak_bytes"])),
        ("arena", f"{render.size(memory['arena_bytes'])}; {arena}, {floor}"),
    ]
