"""Take schedules over from a file of another state folder: only for this device and software, and only whole."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from nimble_jobs import graph
from nimble_jobs.engine import device as devices
from nimble_jobs.errors import NotFound, PlanError, UsageError
from nimble_jobs.planner.keys.request import schedule_key
from nimble_jobs.planner.keys.switches import as_in_training
from nimble_jobs.schedule import FORMAT_VERSION, Schedule
from nimble_jobs.store import ScheduleEntry, Store, cap
from nimble_jobs.store.bundle import Bundle, Bundled
from nimble_jobs.store.schedule_rows import needed_by
from nimble_jobs.store.schedules import Saving

_MEASURED = ("eager_us", "replay_us", "build_s", "tolerance", "peak_bytes", "in_flight")

# These parts of a key do not describe the device or its software. All others do.
_PARTS = {"format", "mode", "input", "outputs", "tolerance", "program"}
_FAMILIES = ("model.", "schedule.", "train.", "input.", "outputs.", "weights.")


@dataclass(frozen=True, kw_only=True)
class ImportedSchedule:
    """What became of one schedule of the file."""

    key: str
    model: str
    input: str
    taken: bool
    said: str


@dataclass(frozen=True, kw_only=True)
class Import:
    """What became of a file."""

    schedules: tuple[ImportedSchedule, ...]  # empty if nobody agreed
    removed: tuple[ScheduleEntry, ...] = ()  # the least recently used here, which went to keep to the size that is set


def import_schedules(
    path: Path, *, store: Store, now: float, agreed: Callable[[int], bool], dry_run: bool = False
) -> Import:
    """Import every schedule of a file that `write_bundle` wrote, or none of them.

    Digests, format, keys (from their parts), plans, device and software are checked before anything is stored; the
    comparison with eager follows at the first load, as always. One that is stored here already stays as it is.
    `agreed` is asked, with the bytes of machine code in the file, before that may ever run. Raises UsageError with one
    line for each schedule that is refused, and where those to import are over the size that is set.
    """
    here = {mode: [_facts(device, mode) for device in devices.present()] for mode in ("inference", "training")}
    with Bundle(path) as bundle:
        problems: list[str] = []
        schedules: dict[str, Schedule] = {}
        for bundled in bundle.schedules:
            try:
                schedules[bundled.key] = _checked(
                    bundle, bundled, here.get(bundled.parts.get("mode", ""), here["inference"])
                )
            except _Refused as e:
                problems.append(f"{path}: schedule {bundled.key[:12]}: {e}; nothing was imported")
        if problems:
            raise UsageError("\n".join(problems))
        code = {ref.name: ref.bytes for b in bundle.schedules for ref in b.artifacts if ref.kind == "kernels"}
        if code and not dry_run and not agreed(sum(code.values())):
            return Import(schedules=())
        there = {bundled.key: _stored(store, bundled.key) for bundled in bundle.schedules}
        new = [bundled for bundled in bundle.schedules if there[bundled.key] is None]
        _check_size(path, new, store.settings.now().cache.size)
        if not dry_run:
            _save(bundle, new, schedules, store, now)
    removed = () if dry_run or not new else store.keep_to_size(now, in_use=[bundled.key for bundled in new])
    taken = tuple(_outcome(bundled, there[bundled.key], dry_run=dry_run) for bundled in bundle.schedules)
    return Import(schedules=taken, removed=removed)


class _Refused(Exception):
    """A schedule that must not be stored here."""


def _check_choice(schedule: Schedule) -> None:
    """Raises _Refused if the schedule does not say soundly whether eager is faster."""
    if schedule.runs not in ("schedule", "eager"):
        raise _Refused(f"not a sound schedule: runs is {schedule.runs!r:.40}; expected 'schedule' or 'eager'")
    if schedule.noise is not None and not (isinstance(schedule.noise, float) and 0 <= schedule.noise <= 1):
        raise _Refused(f"not a sound schedule: noise is {schedule.noise!r:.40}; expected a fraction from 0 to 1")


def _checked(bundle: Bundle, bundled: Bundled, here: list[dict[str, str]]) -> Schedule:
    if schedule_key(bundled.parts) != bundled.key:
        raise _Refused("its key does not match its parts")
    if bundled.parts.get("format") != str(FORMAT_VERSION):
        raise _Refused(f"written in format {bundled.parts.get('format')}; this version reads {FORMAT_VERSION}")
    foreign = min((_foreign(bundled.parts, facts) for facts in here), key=len)
    if foreign:
        raise _Refused("made elsewhere: " + "; ".join(foreign))
    text = bundle.text(bundled)
    try:
        schedule = Schedule.from_json(text)
        graph.check_plan(schedule.program, schedule.plan)
        needed = needed_by(schedule)
        canonical = schedule.to_json() == text
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, PlanError) as e:
        raise _Refused(f"not a sound schedule: {type(e).__name__}: {e}") from e
    for name in _MEASURED:
        value = getattr(schedule, name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 2**63:
            raise _Refused(f"not a sound schedule: {name} is {value!r:.40}; expected a number")
    _check_choice(schedule)
    if not isinstance(schedule.device, str) or not schedule.device.isprintable():
        raise _Refused(f"not a sound schedule: device is {schedule.device!a:.40}; expected text")
    if not canonical:
        raise _Refused("its JSON is not in the canonical form")
    if schedule.key != bundled.key:
        raise _Refused(f"its JSON belongs to schedule {schedule.key[:12]}")
    if needed != set(bundled.artifacts):
        raise _Refused("its artifacts in the file are not those that it needs")
    for ref in bundled.artifacts:
        bundle.artifact(ref)
    return schedule


def _facts(device: torch.device, mode: str) -> dict[str, str]:
    """The facts of a device that keys of a mode are made with."""
    with as_in_training(device) if mode == "training" else nullcontext():
        return devices.facts(device)


def _foreign(parts: dict[str, str], facts: dict[str, str]) -> list[str]:
    """How a schedule's device and software differ from those of a device here."""
    ours = [name for name in parts if name in _PARTS or name.startswith(_FAMILIES)]
    return [
        f"{name} is {parts.get(name, 'absent')}, here {facts.get(name, 'unknown')}"
        for name in sorted({*facts, *parts}.difference(ours))
        if parts.get(name) != facts.get(name)
    ]


def _check_size(path: Path, new: list[Bundled], limit: int | None) -> None:
    artifacts = {ref.name: ref.bytes for bundled in new for ref in bundled.artifacts}
    nbytes = sum(bundled.text_bytes for bundled in new) + sum(artifacts.values())
    if limit is not None and nbytes > limit:
        raise UsageError(
            f"{path}: holds {nbytes:,} bytes to import; {cap.FIELD} allows {limit:,} for all schedules together; "
            "nothing was imported"
        )


def _save(bundle: Bundle, new: list[Bundled], schedules: dict[str, Schedule], store: Store, now: float) -> None:
    savings = [
        Saving(schedule=schedules[bundled.key], parts=bundled.parts, origin=_origin(bundle, bundled)) for bundled in new
    ]
    with store.artifacts.in_use():
        for bundled in new:
            for ref in bundled.artifacts:
                store.artifacts.put(bundle.artifact(ref))
        store.schedules.save_all(savings, now)


def _origin(bundle: Bundle, bundled: Bundled) -> dict[str, str]:
    built_at = datetime.fromtimestamp(bundled.created_at, UTC).isoformat(timespec="seconds")
    return {"built_at": built_at} | bundled.provenance | {"imported_from": bundle.name}


def _outcome(bundled: Bundled, there: ScheduleEntry | None, *, dry_run: bool) -> ImportedSchedule:
    said = "would be imported" if dry_run else "imported"
    if there is not None:
        said = f"is stored here already, {there.state.value}; left as it is"
    return ImportedSchedule(
        key=bundled.key,
        model=bundled.parts.get("model.source", ""),
        input=bundled.parts.get("input", ""),
        taken=there is None,
        said=said,
    )


def _stored(store: Store, key: str) -> ScheduleEntry | None:
    try:
        return store.schedules.get(key)
    except NotFound:
        return None
