"""Makes the job of one tick: the timer's spec with its templates filled in, checked as by `submit`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nimble_jobs import spec as specs
from nimble_jobs.errors import Damaged, UsageError
from nimble_jobs.spec import code
from nimble_jobs.spec.model import CronSpec
from nimble_jobs.spec.timer_rules import TEMPLATED
from nimble_jobs.store import NewJob, Timer
from nimble_jobs.ticks import render
from nimble_jobs.timers.rhythm import Rhythm


def cron_of(timer: Timer) -> CronSpec:
    """The timer's `cron` part. Raises Damaged."""
    if timer.damaged:
        raise Damaged(f"timer {timer.name}: its stored spec is damaged; add it again")
    try:
        return CronSpec.model_validate_json(json.dumps(timer.spec.get("cron")))
    except ValidationError as e:
        raise Damaged(f"timer {timer.name}: its stored cron part cannot be read; add it again") from e


def job_for(timer: Timer, tick: int, rhythm: Rhythm, *, home: Path) -> NewJob:
    """The job of a tick. Its spec has no `cron`, so it runs once.

    Raises UsageError and SpecError if `submit` would refuse the spec: for a missing file, code in a folder that is not
    allowed or cannot be read, or a template that gives no path.
    """
    stored = rendered(timer.spec, tick, rhythm)
    spec = specs.restore(stored | {"cron": None})
    specs.check_files(spec, file=timer.file, base=Path(timer.base), home=home)
    folders = tuple(Path(folder) for folder in timer.allow_python)
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"--allow-python: {folder} is no longer a folder")
    code.check(spec, folders)
    return NewJob.of(spec, allow_python=timer.allow_python)


def rendered(spec: dict[str, Any], tick: int, rhythm: Rhythm) -> dict[str, Any]:
    """A dumped spec with the templates of its fields filled in. Raises BadTemplate."""
    filled = dict(spec)
    previous: int | None = None
    looked = False
    for path in TEMPLATED:
        section, _, field = path.partition(".")
        text = spec.get(section, {}).get(field)
        if not isinstance(text, str) or "{{" not in text:
            continue
        if not looked:
            previous, looked = rhythm.previous(tick), True
        zone = rhythm.expression.zone.key
        filled[section] = filled[section] | {field: render(text, tick=tick, previous=previous, zone=zone)}
    return filled
