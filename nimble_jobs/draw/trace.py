"""A schedule as a trace for Perfetto and chrome://tracing (the Trace Event Format)."""

from __future__ import annotations

import json
from typing import Any

from nimble_jobs.draw import labels
from nimble_jobs.draw.timing import Timing, simulate
from nimble_jobs.schedule import Schedule

_PROCESS = 1
_BACK_US = 0.002  # a flow starts so long before its task ends, for at the end it would belong to the next one


def to_chrome_trace(schedule: Schedule) -> str:
    """JSON with a track a stream, a complete event a task and a flow a sync. Times in microseconds.

    Raises PlanError as `simulate` does.
    """
    timing = simulate(schedule)
    events = [_metadata("process_name", 0, name=labels.title(schedule))]
    for stream in range(schedule.plan.streams):
        events.append(_metadata("thread_name", stream, name=f"stream {stream}"))
        events.append(_metadata("thread_sort_index", stream, sort_index=stream))
    critical = set(timing.critical)
    events.extend(_task(schedule, timing, i, i in critical) for i in schedule.plan.order)
    for number, sync in enumerate(schedule.plan.syncs):
        start, end = timing.start_us[sync.before], timing.end_us[sync.before]
        flow = {"name": "sync", "cat": "sync", "id": number, "pid": _PROCESS}
        events.append(flow | {"ph": "s", "tid": _track(schedule, sync.before), "ts": max(start, end - _BACK_US)})
        events.append(
            flow | {"ph": "f", "bp": "e", "tid": _track(schedule, sync.after), "ts": timing.start_us[sync.after]}
        )
    about = dict(labels.summary(schedule, timing)) | {"remark": labels.remark(timing)}
    whole = {"displayTimeUnit": "ns", "otherData": about, "traceEvents": events}
    return labels.clean(json.dumps(whole, ensure_ascii=False, allow_nan=False))


def _metadata(name: str, stream: int, /, **args: Any) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": _PROCESS, "tid": stream + 1, "args": args}


def _track(schedule: Schedule, task: int) -> int:
    return schedule.plan.stream_of[task] + 1


def _task(schedule: Schedule, timing: Timing, index: int, critical: bool) -> dict[str, Any]:
    task = schedule.program.tasks[index]
    views = {"reads": task.reads, "writes": task.writes, "mutates": task.mutates}
    return {
        "name": labels.short(task.op),
        "cat": f"{labels.family(task.op)}{', critical' if critical else ''}",
        "ph": "X",
        "pid": _PROCESS,
        "tid": _track(schedule, index),
        "ts": timing.start_us[index],
        "dur": timing.end_us[index] - timing.start_us[index],
        "args": {
            "task": index,
            "op": task.op,
            "source": task.source,
            "on the critical path": critical,
            **{verb: labels.views(schedule.program, found) for verb, found in views.items() if found},
        },
    }
