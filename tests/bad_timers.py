"""Specs with mistakes about their timer, and the exact lines that each must give on 22 November 2026."""

# ruff: noqa: E501 - each message stands on one line, as it is printed

from __future__ import annotations

from tests.bad_specs import SCORE, BadSpec

NOW = 1_795_348_800.0  # 2026-11-22 12:00 UTC
DAILY = "../out/digits-{{ tick:%Y-%m-%d }}"
FIELDS = "five fields (minute, hour, day of month, month, day of week), or @hourly, @daily, @weekly, @monthly"
MOMENT = (
    "a date such as 2027-01-31 or a time such as 2027-01-31T18:00, in the timer's zone unless it ends with an offset"
)
ONLY = "expected templates in input.source, output.path, run.key only"
FINER = "a finer template, or if_exists: replace"


def timer(cron: str, path: str = DAILY, spec: str = SCORE) -> str:
    """The spec of a score with a timer: `cron` is a line or more, from line 17 on."""
    lines = "".join(f"  {line}\n" for line in cron.splitlines())
    return spec.replace("../out/digits-score", f'"{path}"') + "cron:\n" + lines


def wrong(name: str, cron: str, *messages: str, path: str = DAILY, spec: str = SCORE) -> BadSpec:
    """`messages` without the file's name."""
    return BadSpec(name=name, text=timer(cron, path, spec), messages=tuple(f"{{file}}:{m}" for m in messages))


def keyed(key: str) -> str:
    """The spec with an idempotency key."""
    return SCORE.replace("device: auto", f'key: "{key}"')


NIGHTLY = 'expression: "15 2 * * *"\n'

BAD_TIMERS = [
    wrong("four fields", 'expression: "15 2 * *"', f"17: cron.expression: found 4 fields in '15 2 * *'; expected {FIELDS}"),
    wrong(
        "six fields",
        'expression: "0 15 2 * * *"',
        f"17: cron.expression: found 6 fields, and there is none for seconds in '0 15 2 * * *'; expected {FIELDS}",
    ),
    wrong("an empty expression", 'expression: ""', f"17: cron.expression: found an empty text; expected {FIELDS}"),
    wrong("an expression that is a number", "expression: 15", "17: cron.expression: found 15; expected text, in quotes"),
    wrong("an unknown name", "expression: '@noon'", f"17: cron.expression: found '@noon'; expected {FIELDS}"),
    wrong("a name for another", "expression: '@yearly'", "17: cron.expression: found '@yearly'; expected '0 0 1 1 *'"),
    wrong("a minute too many", 'expression: "60 2 * * *"', "17: cron.expression: minute: found 60 in '60'; expected 0-59"),
    wrong("an hour too many", 'expression: "0 8,24 * * *"', "17: cron.expression: hour: found 24 in '8,24'; expected 0-23"),
    wrong("the day before the first", 'expression: "0 2 0 * *"', "17: cron.expression: day of month: found 0 in '0'; expected 1-31"),
    wrong(
        "a month that is none",
        'expression: "0 2 1 SEPT *"',
        "17: cron.expression: month: found 'SEPT'; expected *, 1-12 or JAN-DEC, a list, a range or a step",
    ),
    wrong("a weekday too many", 'expression: "0 2 * * 8"', "17: cron.expression: day of week: found 8 in '8'; expected 0-7 or SUN-SAT"),
    wrong(
        "a range backwards",
        'expression: "0 22-4 * * *"',
        "17: cron.expression: hour: found '22-4', a range that runs backwards; expected two ranges, such as 22-23,0-4",
    ),
    wrong("a step of nothing", 'expression: "*/0 * * * *"', "17: cron.expression: minute: found the step 0 in '*/0'; expected a step from 1 to 59"),
    wrong(
        "a step without a range",
        'expression: "5/15 * * * *"',
        "17: cron.expression: minute: found '5/15'; expected a range before the step, such as 5-59/15",
    ),
    wrong(
        "a date that never comes",
        'expression: "0 2 30 FEB *"',
        "17: cron.expression: '0 2 30 FEB *' is never due: there is no such date; expected a date that exists",
    ),
    wrong("a zone in small letters", NIGHTLY + "timezone: europe/berlin", "18: cron.timezone: found 'europe/berlin'; expected Europe/Berlin"),
    wrong(
        "an offset for a zone",
        NIGHTLY + "timezone: UTC+2",
        "18: cron.timezone: found 'UTC+2'; expected an IANA name such as Europe/Berlin, or UTC",
    ),
    wrong(
        "an overlap of another system",
        NIGHTLY + "overlap: Forbid",
        "18: cron.overlap: found 'Forbid'; expected skip, queue, allow or replace",
    ),
    wrong("a catch_up that is a bool", NIGHTLY + "catch_up: true", "18: cron.catch_up: found true; expected latest, all or none"),
    wrong(
        "a grace that is no duration",
        NIGHTLY + "grace: ten minutes",
        "18: cron.grace: found 'ten minutes'; expected seconds or a duration such as 90, 5s, 10m, 2h or 1h30m",
    ),
    wrong("a grace of nothing", NIGHTLY + "grace: 0", "18: cron.grace: found 0s; expected at least 1s, or null (until the next tick)"),
    wrong(
        "a jitter that is longer than grace",
        NIGHTLY + "grace: 10m\njitter: 20m",
        "19: cron.jitter: found 20m, longer than cron.grace; expected at most 10m",
    ),
    wrong(
        "a jitter that reaches the next tick",
        'expression: "0,10 2 * * *"\njitter: 15m',
        "18: cron.jitter: found 15m, but ticks are 10m apart; expected less than 10m",
        path="../out/digits-{{ tick:%Y-%m-%dT%H%M }}",
    ),
    wrong("a start that is no date", NIGHTLY + "start: 1.12.2026", f"18: cron.start: found '1.12.2026'; expected {MOMENT}"),
    wrong("an end that does not exist", NIGHTLY + "end: 2027-02-30", f"18: cron.end: found '2027-02-30'; expected {MOMENT}"),
    wrong(
        "an end before the start",
        NIGHTLY + "start: 2027-01-31\nend: 2027-01-01",
        "19: cron.end: found '2027-01-01', which is not after cron.start; expected a later time",
    ),
    wrong("an end that is over", NIGHTLY + "end: 2026-11-22T11:00Z", "18: cron.end: found '2026-11-22T11:00Z', which is in the past; expected a future time"),
    wrong(
        "no tick until the end",
        'expression: "0 0 1 1 *"\nend: 2026-12-24',
        "18: cron.end: found '2026-12-24', but no tick is due before that; expected a later time",
    ),
    wrong("none kept", NIGHTLY + "keep: 0", "18: cron.keep: found 0; expected at least 1"),
    wrong("a field of another system", NIGHTLY + "concurrencyPolicy: Forbid", "18: cron.concurrencyPolicy: unknown field; expected one of expression, timezone, overlap, catch_up, grace, jitter, start, end, keep"),
    wrong("a timer without its expression", "timezone: UTC", "16: cron.expression: missing; expected five fields, as in crontab, or @hourly, @daily, @weekly, @monthly"),
    wrong(
        "one path for all ticks",
        NIGHTLY,
        "13: output.path: found 'digits', the same for every tick; expected a template such as {{ tick:%Y-%m-%d }}, or if_exists: replace",
        path="digits",
    ),
    wrong(
        "one path for two ticks a day",
        'expression: "15 2,14 * * *"',
        f"13: output.path: the ticks 2026-11-23 02:15 +0000 and 2026-11-23 14:15 +0000 both give '2026-11-23'; expected {FINER}",
        path="{{ tick:%Y-%m-%d }}",
    ),
    wrong(
        "one path in the hour that comes twice",
        'expression: "*/30 * * * *"\ntimezone: Europe/Berlin',
        "13: output.path: the ticks 2027-10-31 02:00 +0200 and 2027-10-31 02:00 +0100 both give '20271031T0200'; expected %z in the template, because this hour occurs twice, or if_exists: replace",
        path="{{ tick:%Y%m%dT%H%M }}",
    ),
    wrong(
        "one path for several months",
        'expression: "0 0 1 * *"',
        f"13: output.path: the ticks 2026-12-01 00:00 +0000 and 2027-01-01 00:00 +0000 both give 'day-01'; expected {FINER}",
        path="day-{{ tick:%d }}",
    ),
    wrong(
        "one key for all ticks",
        NIGHTLY,
        "15: run.key: found 'tonight', the same for every tick; expected a template such as {{ tick:%Y-%m-%d }}",
        spec=keyed("tonight"),
    ),
    wrong(
        "one key for a month of ticks",
        NIGHTLY,
        "15: run.key: the ticks 2026-11-23 02:15 +0000 and 2026-11-24 02:15 +0000 both give 'score-2026-11'; expected a finer template",
        spec=keyed("score-{{ tick:%Y-%m }}"),
    ),
    wrong(
        "a template without a format",
        NIGHTLY,
        "13: output.path: found '{{ tick }}', which has no format; expected {{ tick:%Y-%m-%d }} or {{ previous_tick:%Y-%m-%d }}",
        path="../out/{{ tick }}",
    ),
    wrong(
        "a template of another language",
        NIGHTLY,
        "13: output.path: found '{{ ds }}'; expected {{ tick:%Y-%m-%d }} or {{ previous_tick:%Y-%m-%d }}",
        path="../out/{{ ds }}",
    ),
    wrong(
        "a template with a name of a month",
        NIGHTLY,
        "13: output.path: found '%b' in '{{ tick:%d-%b }}'; expected one of %Y %y %m %d %H %M %S %j %G %V %u %z %%",
        path="../out/{{ tick:%d-%b }}",
    ),
    wrong(
        "a template that does not end",
        NIGHTLY,
        "13: output.path: found {{ without its pair; expected {{ tick:%Y-%m-%d }} or {{ previous_tick:%Y-%m-%d }}",
        path="../out/{{ tick:%Y-%m-%d",
    ),
    wrong(
        "a template in the weights",
        NIGHTLY,
        f"6: model.weights: contains a template of the tick; {ONLY}",
        spec=SCORE.replace("args: {num_classes: 10}", "weights: '{{ tick:%Y }}.pt'"),
    ),
    wrong(
        "a template in the name",
        NIGHTLY,
        "2: name: found 'score-{{ tick:%d }}'; expected 1 to 100 letters, digits, dots, dashes and underscores, the first a letter or digit",
        spec=SCORE.replace("name: digits-score", "name: 'score-{{ tick:%d }}'"),
    ),
    BadSpec(
        name="a template without a timer",
        text=SCORE.replace("../out/digits-score", '"{{ tick:%Y }}"'),
        messages=("{file}:13: output.path: found '{{ tick:%Y }}', but there is no cron; expected text without a template, or cron",),
    ),
    wrong(
        "an input that is not there",
        NIGHTLY,
        "8: input.source: no file or folder {dir}/tomorrow.npz; expected one that exists, or run.after with the job that will write it",
        spec=SCORE.replace("digits.npz", "tomorrow.npz"),
    ),
]  # fmt: skip
