"""Contradictions in a spec with `cron`: bounds without a tick, ticks that share a path, templates in other fields."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

from nimble_jobs.spec.files import Known
from nimble_jobs.spec.findings import Finding, place
from nimble_jobs.spec.model import CronSpec, JobSpec
from nimble_jobs.spec.tree import Tree, Where
from nimble_jobs.spec.units import format_duration, show
from nimble_jobs.ticks import YEAR_S, BadTemplate, Expression, clash, closest_s, parse_moment, placeholders, render
from nimble_jobs.ticks.zones import local

TEMPLATED = ("input.source", "output.path", "run.key")
_SUGGESTED = "{{ tick:%Y-%m-%d }}"
_MEANT = re.compile(r"\{\{\s*(?:previous_)?tick\b")


def check(spec: JobSpec, known: Known, tree: Tree, *, now: float) -> Iterator[Finding]:
    """Report what is wrong with the timer's fields. `now`: Unix seconds."""
    if not known(("cron",)):
        return
    if spec.cron is None:
        for field in TEMPLATED:
            text = _written(tree.value, field)
            if known((field,)) and _MEANT.search(text):
                yield Finding(field, f"found {show(text)}, but there is no cron", "text without a template, or cron")
        return
    for where in set(_elsewhere(tree.value)) - tree.bad:
        tree.report(where, "contains a template of the tick", f"templates in {', '.join(TEMPLATED)} only")
        tree.bad.add(where)
    if not known(f"cron.{field}" for field in ("expression", "timezone", "start", "end")):
        return
    expression = Expression.parse(spec.cron.expression, spec.cron.timezone)
    bounds = _bounds(spec.cron, now)
    wrong = list(_wrong_bounds(spec.cron, expression, bounds, now))
    yield from wrong
    if wrong:
        return
    yield from _spread(spec.cron, expression, bounds, known)
    for field, text in _templated(spec, known):
        if field == "run.key" or (field == "output.path" and spec.output.if_exists != "replace"):
            replaced = field == "output.path" and spec.input.only_new is None
            instead = ", or if_exists: replace" if replaced else ""
            for problem, expected in _alike(text, _written(tree.value, field), expression, bounds):
                yield Finding(field, problem, expected + instead)


def only_once(file: str) -> Finding:
    """The finding for a spec with `cron` that was given to a command that runs it."""
    shown = "-" if file.startswith("<") else file  # <stdin>
    return Finding("cron", "this spec is a timer", f"`nimble-jobs cron add {shown}`, or cron=null to run the job once")


def _templated(spec: JobSpec, known: Known) -> Iterator[tuple[str, str]]:
    texts = (("input.source", spec.input.source), ("output.path", str(spec.output.path)), ("run.key", spec.run.key))
    for field, text in texts:
        if text is not None and known((field, "output.if_exists") if field == "output.path" else (field,)):
            yield field, text


def _written(value: object, field: str) -> str:
    """The text of a field before its path is made absolute; empty if there is none."""
    for part in place(field):
        value = value.get(part) if isinstance(value, dict) else None
    return value if isinstance(value, str) else ""


def _elsewhere(value: object, where: Where = ()) -> Iterator[Where]:
    """The places of templates in fields that do not allow them."""
    if isinstance(value, dict | list):
        pairs: Iterable[tuple[str | int, object]] = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in pairs:
            yield from _elsewhere(inner, (*where, key))
    elif isinstance(value, str) and _MEANT.search(value) and where not in [place(field) for field in TEMPLATED]:
        yield where


def _bounds(cron: CronSpec, now: float) -> tuple[float, float]:
    """The year to look at: ticks after the first moment, up to the second."""
    start = parse_moment(cron.start, cron.timezone) if cron.start is not None else -math.inf
    end = parse_moment(cron.end, cron.timezone, last=True) if cron.end is not None else math.inf
    since = max(now, start - 1)
    return since, min(since + YEAR_S, end)


def _wrong_bounds(cron: CronSpec, expression: Expression, bounds: tuple[float, float], now: float) -> Iterator[Finding]:
    if cron.end is None:
        return
    end = parse_moment(cron.end, cron.timezone, last=True)
    if cron.start is not None and end <= parse_moment(cron.start, cron.timezone):
        yield Finding("cron.end", f"found {show(cron.end)}, which is not after cron.start", "a later time")
    elif end <= now:
        yield Finding("cron.end", f"found {show(cron.end)}, which is in the past", "a future time")
    elif next(expression.after(bounds[0]), math.inf) > end:
        yield Finding("cron.end", f"found {show(cron.end)}, but no tick is due before that", "a later time")


def _spread(cron: CronSpec, expression: Expression, bounds: tuple[float, float], known: Known) -> Iterator[Finding]:
    if known(("cron.grace",)) and cron.grace is not None and cron.grace < 1:
        expected = "at least 1s, or null (until the next tick)"
        yield Finding("cron.grace", f"found {format_duration(cron.grace)}", expected)
    elif known(("cron.grace", "cron.jitter")) and cron.grace is not None and cron.jitter > cron.grace:
        problem = f"found {format_duration(cron.jitter)}, longer than cron.grace"
        yield Finding("cron.jitter", problem, f"at most {format_duration(cron.grace)}")
    if known(("cron.jitter",)) and cron.jitter:
        apart_s = closest_s(expression, *bounds)
        if apart_s is not None and cron.jitter >= apart_s:
            problem = f"found {format_duration(cron.jitter)}, but ticks are {format_duration(apart_s)} apart"
            yield Finding("cron.jitter", problem, f"less than {format_duration(apart_s)}")


def _alike(text: str, written: str, expression: Expression, bounds: tuple[float, float]) -> Iterator[tuple[str, str]]:
    """What two ticks share that they must not, and what was expected. `written`: the text before its path was made
    absolute, for messages.
    """
    try:
        fixed = not placeholders(text)
    except BadTemplate as e:  # in the path of the spec's folder
        yield e.problem, e.expected
        return
    if fixed:
        yield f"found {show(written)}, the same for every tick", f"a template such as {_SUGGESTED}"
        return
    shared = clash(text, expression, *bounds)
    if shared is None:
        return
    zone = expression.zone
    first, second = (local(tick, zone) for tick in (shared.first, shared.second))
    ticks = " and ".join(f"{moment:%Y-%m-%d %H:%M %z}" for moment in (first, second))
    alike = render(written, tick=shared.first, previous=expression.before(shared.first), zone=zone.key)
    again = first.replace(tzinfo=None, fold=0) == second.replace(tzinfo=None, fold=0)
    expected = "%z in the template, because this hour occurs twice" if again else "a finer template"
    yield f"the ticks {ticks} both give {show(alike)}", expected
