"""What the commands about stored schedules share: rows, columns, and finding schedules by key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from nimble_jobs.cli import output, render
from nimble_jobs.cli.listing import Column, Row

if TYPE_CHECKING:
    from nimble_jobs.store import ScheduleEntry, Store

Key = Annotated[str, typer.Argument(metavar="KEY", help="Key of a schedule, or its beginning.", show_default=False)]
KeyList = Annotated[
    list[str], typer.Argument(metavar="KEY...", help="Keys of schedules, or their beginnings.", show_default=False)
]
STATE_STYLE = {"ready": "green", "resident": "bold green", "stale": "yellow", "quarantined": "bold red"}
KEYS = [
    "key",
    "model",
    "device",
    "input",
    "dtype",
    "mode",
    "streams",
    "syncs",
    "replay_us",
    "eager_us",
    "speedup",
    "bytes",
    "hits",
    "resident_hits",
    "build_s",
    "created_at",
    "last_used_at",
    "state",
    "reason",
    "resident",
]


def rows_of(store: Store, entries: Sequence[ScheduleEntry]) -> list[Row]:
    """The JSON rows of `cache ls`."""
    residents = store.schedules.residents([worker.id for worker in store.workers.live()])
    return [
        {
            "key": entry.key,
            "model": entry.model,
            "device": entry.device,
            "input": entry.input,
            "dtype": entry.dtype,
            "mode": entry.mode,
            "streams": entry.streams,
            "syncs": entry.syncs,
            "replay_us": entry.replay_us,
            "eager_us": entry.eager_us,
            "speedup": round(entry.eager_us / entry.replay_us, 3) if entry.replay_us else None,
            "bytes": entry.bytes,
            "hits": entry.hits,
            "resident_hits": entry.resident_hits,
            "build_s": entry.build_s,
            "created_at": output.iso(entry.created_at),
            "last_used_at": output.iso(entry.last_used_at),
            "state": entry.state.value,
            "reason": entry.reason,
            "resident": residents.get(entry.key, []),
        }
        for entry in entries
    ]


def found(store: Store, keys: Sequence[str]) -> list[ScheduleEntry]:
    """The schedules that keys, or beginnings of keys, name; each once. Raises NotFound, UsageError."""
    return list({entry.key: entry for entry in (store.schedules.get(key) for key in keys)}.values())


def state_of(row: Row) -> str:
    """The state, or that a ready schedule is resident."""
    return "resident" if row["resident"] and row["state"] == "ready" else str(row["state"])


def named(entry: ScheduleEntry) -> str:
    """A schedule in one line."""
    what = " ".join(filter(None, (entry.key[:12], entry.model, entry.input, entry.dtype)))
    return f"{what}, {render.size(entry.bytes)}"


def count(number: int, noun: str = "schedule") -> str:
    """1 schedule, 2 schedules."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shape(text: str) -> str:
    """`x:float32[4, 3, 32, 32]` as short as it is clear beside a dtype: 4×3×32×32."""
    name, _, rest = text.partition(":")
    kind, bracket, sizes = rest.partition("[")
    if name != "x" or not bracket or "[" in sizes:
        return text
    short = sizes.rstrip("]").replace(", ", "×")
    return short if kind.startswith(("float", "bfloat")) else f"{kind} {short}"


COLUMNS = (
    Column(header="KEY", cell=lambda row: row["key"][:12]),
    Column(header="MODEL", cell=lambda row: row["model"], flexible=True),
    Column(header="INPUT", cell=lambda row: shape(row["input"]), from_width=100),
    Column(header="DTYPE", cell=lambda row: row["dtype"], from_width=100),
    Column(header="MODE", cell=lambda row: row["mode"], from_width=150),
    Column(header="STREAMS", cell=lambda row: str(row["streams"]), justify="right", from_width=118),
    Column(header="REPLAY", cell=lambda row: render.micros(row["replay_us"]), justify="right"),
    Column(header="SPEED-UP", cell=lambda row: f"{row['speedup']:.2f}×" if row["speedup"] else "-", justify="right"),
    Column(header="SIZE", cell=lambda row: render.size(row["bytes"]), justify="right"),
    Column(header="HITS", cell=lambda row: str(row["hits"]), justify="right"),
    Column(header="USED", cell=lambda row: str(row["last_used_at"])[:16].replace("T", " "), from_width=118),
    Column(header="STATE", cell=state_of, style=lambda row: STATE_STYLE.get(state_of(row), "")),
    Column(header="DEVICE", cell=lambda row: row["device"], flexible=True, from_width=150),
)
