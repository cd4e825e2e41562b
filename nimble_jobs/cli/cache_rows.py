"""Shared by the commands about stored schedules: rows, columns, and finding schedules by key."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from nimble_jobs.cli.filters import Keys, Kind
from nimble_jobs.cli.listing import Column
from nimble_jobs.plural import count
from nimble_jobs.views import figures
from nimble_jobs.views.figures import Row
from nimble_jobs.views.schedules import brief

if TYPE_CHECKING:
    from nimble_jobs.store import ScheduleEntry, Store, WantedSchedule

Key = Annotated[
    str, typer.Argument(metavar="KEY", help="Key of a schedule, or its first characters.", show_default=False)
]
KeyList = Annotated[
    list[str],
    typer.Argument(metavar="KEY...", help="Keys of schedules, or their first characters.", show_default=False),
]
_TEXTS = re.compile(r"\[(\d+)\] attention_mask, input_ids \w+\[(\d+)\]")  # a batch padded to a bucket
STATE_STYLE = {"ready": "green", "resident": "bold green", "stale": "yellow", "quarantined": "bold red"}
KEYS: Keys = {
    "key": Kind.TEXT,
    "model": Kind.TEXT,
    "device": Kind.TEXT,
    "input": Kind.TEXT,
    "bucket": Kind.NUMBER,
    "family": Kind.TEXT,
    "dtype": Kind.TEXT,
    "mode": ("inference", "training"),
    "streams": Kind.NUMBER,
    "syncs": Kind.NUMBER,
    "replay_us": Kind.MICROSECONDS,
    "eager_us": Kind.MICROSECONDS,
    "runs": ("schedule", "eager"),
    "speedup": Kind.FACTOR,
    "bytes": Kind.BYTES,
    "hits": Kind.NUMBER,
    "resident_hits": Kind.NUMBER,
    "build_s": Kind.SECONDS,
    "created_at": Kind.TIME,
    "last_used_at": Kind.TIME,
    "state": ("ready", "stale", "quarantined"),
    "reason": Kind.TEXT,
    "resident": Kind.TEXTS,
}


def wanted_line(wanted: WantedSchedule) -> str:
    """One line about a schedule that jobs ran without: who builds it, or why nobody does."""
    what = f"{wanted.key[:12]} {wanted.model} {shape(wanted.input)}"
    missed = f"{count(wanted.misses, 'job')} ran without it"
    if wanted.state == "failed":
        return f"not built: {what}: {wanted.why}; {missed}"
    if wanted.state == "building":
        return f"being built by worker {wanted.builder}: {what}; {missed}"
    return f"an idle worker will build {what}, in about {figures.duration(wanted.costs_s)}; {missed}"


def found(store: Store, keys: Sequence[str]) -> list[ScheduleEntry]:
    """The schedules with these keys or key prefixes, each once. Raises NotFound, UsageError."""
    return list({entry.key: entry for entry in (store.schedules.get(key) for key in keys)}.values())


def state_of(row: Row) -> str:
    """The state, with `resident` if a running worker holds the schedule; ready and resident is just `resident`."""
    state = str(row["state"])
    if not row["resident"]:
        return state
    return "resident" if state == "ready" else f"{state}, resident"


def state_style(row: Row) -> str:
    """How rich shows the state."""
    return STATE_STYLE.get(state_of(row)) or STATE_STYLE.get(row["state"], "")


def named(entry: ScheduleEntry) -> str:
    """A schedule in one line."""
    what = " ".join(filter(None, (entry.model, shape(entry.input), entry.dtype)))
    return f"{entry.key[:12]}  {what}, {figures.size(entry.bytes)}"


def with_reason(head: str, reason: str, stream: TextIO) -> str:
    """Head and reason on one line for a pipe. On a terminal a reason that does not fit goes below the head."""
    if not reason:
        return head
    line = f"{head}: {reason}"
    width = shutil.get_terminal_size().columns
    if not stream.isatty() or len(line) <= width:
        return line
    return f"{head}\n{textwrap.fill(reason, width, initial_indent=' ' * 4, subsequent_indent=' ' * 4)}"


def removed_for_room(keys: Sequence[str]) -> str:
    """A line about the schedules that the size limit removed."""
    from nimble_jobs.store.cap import FIELD

    return (
        f"{FIELD}: removed {count(len(keys), 'schedule')}, least recently used: {', '.join(key[:12] for key in keys)}"
    )


def shape(text: str) -> str:
    """`x:float32[4, 3, 32, 32]` as short as it is clear beside a dtype: 4×3×32×32. Of texts, `512×32 tokens`."""
    if texts := _TEXTS.match(text):
        return f"{texts[1]}×{texts[2]} tokens"
    name, _, rest = text.partition(":")
    kind, bracket, sizes = rest.partition("[")
    if name != "x" or not bracket or "[" in sizes:
        return text
    short = sizes.rstrip("]").replace(", ", "×")
    return short if kind.startswith(("float", "bfloat")) else f"{kind} {short}"


def age(iso: str) -> str:
    """How long ago, in its largest unit: 40d, 3h, 12m, now."""
    seconds = time.time() - datetime.fromisoformat(iso).timestamp()
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f}{unit}"
    return "now"


def _speed(row: Row) -> str:
    if row["runs"] == "eager":
        return "eager"  # is faster; a line below the table gives both times
    return f"{row['speedup']:.2f}×" if row["speedup"] else "-"


def measured_on(rows: Sequence[Row]) -> str:
    """The devices that replay times were measured on."""
    devices = list(dict.fromkeys(row["device"] for row in rows))
    return f"measured on {'; '.join(devices[:3])}{'; ...' if len(devices) > 3 else ''}" if devices else ""


def families(rows: Sequence[Row]) -> list[str]:
    """A line for each model of which schedules of several buckets of texts are listed."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["family"] is not None:
            found.setdefault(row["family"], []).append(row)
    return [
        f"{those[0]['model']}: {len(those)} schedules for texts of up to "
        f"{max(row['bucket'] for row in those):,} tokens, "
        f"{figures.size(sum(row['bytes'] for row in those))} together ({figures.few([r['key'][:12] for r in those])})"
        for those in found.values()
        if len(those) > 1
    ]


COLUMNS = (
    Column(header="KEY", cell=lambda row: row["key"][:12]),
    Column(header="MODEL", cell=lambda row: row["model"], flexible=True),
    Column(header="INPUT", cell=lambda row: shape(row["input"]), flexible=True, gives_first=True),
    Column(header="DTYPE", cell=lambda row: row["dtype"], from_width=100, telling=True),
    Column(header="MODE", cell=lambda row: row["mode"], from_width=150, telling=True),
    Column(header="STREAMS", cell=lambda row: str(row["streams"]), justify="right", from_width=100),
    Column(header="REPLAY", cell=lambda row: figures.micros(row["replay_us"]), justify="right"),
    Column(header="SPEED", cell=_speed, justify="right"),
    Column(header="SIZE", cell=lambda row: figures.size(row["bytes"]), justify="right", from_width=90),
    Column(header="HITS", cell=lambda row: str(row["hits"]), justify="right"),
    Column(header="USED", cell=lambda row: age(row["last_used_at"]), justify="right", from_width=110),
    Column(header="STATE", cell=state_of, style=state_style),
    Column(header="DEVICE", cell=lambda row: row["device"], flexible=True, from_width=150, telling=True),
)


def explained(rows: Sequence[Row]) -> list[str]:
    """One line for each reason why schedules are not ready, and for each that is not used because eager is faster."""
    keys: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["state"] != "ready":
            keys.setdefault((row["state"], brief(row["key"], row["reason"])), []).append(row["key"][:12])
    slower = [
        f"eager is faster here ({row['key'][:12]}): eager {figures.micros(row['eager_us'])}, "
        f"replay {figures.micros(row['replay_us'])}"
        for row in rows
        if row["runs"] == "eager" and row["state"] == "ready"
    ]
    unready = [
        with_reason(f"{state} ({figures.few(those)})", reason, sys.stderr) for (state, reason), those in keys.items()
    ]
    return [*unready, *slower]
