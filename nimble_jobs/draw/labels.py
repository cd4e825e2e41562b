"""Words and numbers of a schedule, as every drawing writes them. All of it plain text: each format escapes its own."""

from __future__ import annotations

import re

from nimble_jobs.draw.timing import Timing
from nimble_jobs.schedule import BufferKind, Port, Program, Schedule, View

_KERNEL = "triton."
_VIEWS_SHOWN = 8

FAMILIES = {  # what a task's colour says: words of operator and kernel names, the first match counts
    "matmul, convolution": ("conv", "mm", "matmul", "linear", "attention", "triton_tem"),
    "normalisation": ("norm", "softmax"),
    "copy, concatenation": ("cat", "copy", "clone", "pad", "index", "gather", "embedding", "slice", "fill", "stack"),
    "pooling, reduction": ("pool", "mean", "sum", "amax", "amin", "argmax", "var", "topk", "triton_red", "triton_per"),
    "element by element": (),
}


_UNPRINTABLE = re.compile("[^\t\n\u0020-\u007e\u00a0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def clean(text: str) -> str:
    """`text` without what neither XML nor a file in UTF-8 can hold."""
    return _UNPRINTABLE.sub("\ufffd", text)


def short(op: str) -> str:
    """An operator without its namespace and overload, a compiled kernel without its prefix."""
    parts = op.removeprefix(_KERNEL).split(".")
    return parts[1] if len(parts) == 3 else parts[-1]


def family(op: str) -> str:
    """The key of FAMILIES that an operator belongs to. A compiled kernel's name lists all that was fused, so that only
    its beginning counts.
    """
    name = short(op)
    name = name[: len("triton_poi")] if name.startswith("triton_") else name
    return next((title for title, words in FAMILIES.items() if any(w in name for w in words)), list(FAMILIES)[-1])


def duration(us: float, measured: bool = True) -> str:
    """A time with its unit, three or four digits; in units of one task where nothing was measured."""
    if not measured:
        return f"{us:g} {'unit' if us == 1 else 'units'}"
    for size, unit in ((1e6, "s"), (1e3, "ms")):
        if us >= size:
            return f"{us / size:.4g} {unit}"
    return f"{us:.3g} µs" if us < 100 else f"{us:.0f} µs"


def view(program: Program, of: View) -> str:
    """A view with its dtype, shape, and the buffer that it lies in."""
    buffer = program.buffers[of.buffer]
    name = (buffer.name or "")[:12] if buffer.kind is BufferKind.CONSTANT else buffer.name or f"{of.buffer}"
    kind = "buffer" if buffer.kind is BufferKind.INTERMEDIATE else buffer.kind.value
    return f"{of.dtype}[{', '.join(map(str, of.shape))}] {kind} {name}"


def signature(port: Port) -> str:
    """An input by name, dtype and shape."""
    return f"{port.name} {port.view.dtype}[{', '.join(map(str, port.view.shape))}]"


def views(program: Program, found: tuple[View, ...]) -> list[str]:
    """The first few views of a list, and how many are left."""
    shown = [view(program, v) for v in found[:_VIEWS_SHOWN]]
    return [*shown, f"and {len(found) - _VIEWS_SHOWN} more"] if len(found) > _VIEWS_SHOWN else shown


def details(schedule: Schedule, timing: Timing, index: int, *, critical: bool) -> str:
    """Everything about one task, in lines."""
    task = schedule.program.tasks[index]
    lines = [
        f"{index}: {task.op}",
        f"{duration(timing.end_us[index] - timing.start_us[index], timing.measured)} on stream "
        f"{schedule.plan.stream_of[index]}, starts at {duration(timing.start_us[index], timing.measured)}"
        f"{', on the critical path' if critical else ''}",
    ]
    if task.source:
        lines.append(f"from {task.source}")
    fresh = tuple(v for v in task.writes if v not in task.mutates)
    for verb, found in (("reads", task.reads), ("writes", fresh), ("changes", task.mutates)):
        lines.extend(f"{verb} {text}" for text in views(schedule.program, found))
    return "\n".join(lines)


def title(schedule: Schedule) -> str:
    """Which schedule, and for which device."""
    return f"Schedule {schedule.key[:16]} on {schedule.device}"


def summary(schedule: Schedule, timing: Timing) -> list[tuple[str, str]]:
    """What stands below the title of every drawing: names and values."""
    facts = schedule.facts
    measured = timing.measured
    return [
        ("Input", ", ".join(signature(p) for p in schedule.program.inputs) or "none"),
        ("Replay, measured", duration(schedule.replay_us)),
        ("Eager, measured", duration(schedule.eager_us)),
        ("Simulated", duration(timing.makespan_us, measured)),
        ("Critical path", duration(timing.critical_path_us, measured)),
        ("Total work", duration(timing.total_work_us, measured)),
        ("Tasks", f"{facts.tasks:,}"),
        ("Width", f"{facts.width:,}" if facts.width_exact else f"at most {facts.width:,}"),
        ("Streams", f"{facts.streams:,}"),
        ("Syncs needed", f"{facts.syncs_needed:,}"),
        ("Syncs used", f"{facts.syncs_used:,}"),
    ]


def remark(timing: Timing) -> str:
    """How far a drawing can be trusted."""
    if not timing.measured:
        return "No task of this schedule was timed: each counts as one unit."
    return (
        "Each task takes the time that was measured for it alone, after its stream's previous task and what it waits "
        "for. On the device tasks also share the machine, so the measured replay differs."
    )
