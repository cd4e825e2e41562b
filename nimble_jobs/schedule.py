"""The values that make up a schedule, from buffers to measurements. Frozen, without torch, with one canonical JSON.

A *program* is what was recorded: the tasks in program order and the buffers that they touch. A *plan* says on which
stream and in which order each task is launched, and which tasks wait for which. A *schedule* is both, with how they
were checked and measured.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from nimble_jobs.task_times import TaskChoice

FORMAT_VERSION = 5
COMPILERS = frozenset({"inductor", "epilogues", "crowded", "max-autotune"})  # of `Schedule.kernels`
ALL_REDUCE = "nimble_jobs.all_reduce_.default"  # the task that sums a tensor over all ranks of a training


class BufferKind(StrEnum):
    """Who owns the bytes of a buffer."""

    INPUT = "input"  # filled by the caller before each replay
    STATE = "state"  # a parameter, buffer or tensor attribute of the module, by its dotted name
    CONSTANT = "constant"  # made while recording outside any task; its bytes are an artifact named by its SHA-256
    INTERMEDIATE = "intermediate"  # written before it is read within one replay


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """One piece of memory."""

    index: int
    kind: BufferKind
    nbytes: int
    name: str | None = None  # state name, input name, or the constant's SHA-256
    on_host: bool = False  # a zero-dimensional constant in host memory, read by a device task as a scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A strided tensor over a buffer. `stride` and `offset` count elements of `dtype`."""

    buffer: int
    dtype: str  # torch's name without the prefix: float32, int64, ...
    itemsize: int  # bytes per element
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    @property
    def span(self) -> tuple[int, int]:
        """Smallest byte range [start, end) of the buffer that holds every element."""
        if 0 in self.shape:
            return (self.offset * self.itemsize, self.offset * self.itemsize)
        last = self.offset
        for n, stride in zip(self.shape, self.stride, strict=True):
            last += (n - 1) * stride
        return (self.offset * self.itemsize, (last + 1) * self.itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class Special:
    """An argument that JSON cannot express: a dtype, device, layout, memory format, non-finite or complex number."""

    kind: str  # dtype | device | layout | memory_format | float | complex
    value: str


Arg = View | Special | None | bool | int | float | str | tuple["Arg", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One unit of device work: an operator call, with everything that it reads and writes.

    `mutates` are the writes into buffers that existed before the task; a fresh output is in `writes` alone.
    """

    index: int
    op: str  # operator overload as the dispatcher names it, for instance aten.convolution.default
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    outputs: Arg  # views of what the call returns, in its own nesting
    reads: tuple[View, ...]
    writes: tuple[View, ...]
    mutates: tuple[View, ...]
    random: bool = False  # draws from the device's generator
    source: str | None = None  # where the call came from: FILE:LINE and module path


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledKernel:
    """How to launch a compiled kernel, and where its machine code lies in the schedule's binaries."""

    name: str  # the name that the program's tasks use
    function: str  # in the binary
    grid: tuple[int, int, int]  # blocks
    warps: int  # of a block
    shared_bytes: int  # of a block
    arg_types: str  # a letter for each parameter
    start: int  # bytes
    nbytes: int
    scratch_bytes: int = dataclasses.field(default=0, metadata={"newer": True})  # of device memory for each block


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A named input or output of a program."""

    name: str
    view: View


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What was recorded, in program order. It holds no device addresses and no live objects."""

    buffers: tuple[Buffer, ...]
    tasks: tuple[Task, ...]
    inputs: tuple[Port, ...]
    state: tuple[Port, ...]  # the whole tensors behind the buffers of kind STATE
    constants: tuple[Port, ...]  # likewise, named by SHA-256
    outputs: tuple[Port, ...]

    def bare(self) -> Program:
        """The program without its tasks' source lines, which do not affect what it computes."""
        return dataclasses.replace(self, tasks=tuple(dataclasses.replace(t, source=None) for t in self.tasks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """Task `after` waits, across streams, until task `before` has finished."""

    before: int
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where and when each task of a program is launched."""

    order: tuple[int, ...]  # task indexes in launch order
    stream_of: tuple[int, ...]  # by task index; streams are numbered from 0
    syncs: tuple[Sync, ...]

    @property
    def streams(self) -> int:
        return max(self.stream_of, default=-1) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphFacts:
    """The counts that the paper uses, and bounds that hold for every replay."""

    tasks: int
    edges: int  # dependencies before the reduction
    meg_edges: int  # of the minimum equivalent graph
    matching: int  # size of a maximum matching in its bipartite graph
    width: int  # size of a largest antichain: how many tasks can ever be ready together
    width_exact: bool = True  # else `width` is an upper bound
    streams: int
    syncs_needed: int  # meg_edges - matching
    syncs_used: int
    critical_path_us: float | None = None  # longest path over measured task times
    total_work_us: float | None = None  # sum of measured task times


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to run the model, as built and measured."""

    name: str
    replay_us: float | None
    records_per_s: float | None
    peak_bytes: int | None
    error: float | None  # relative norm against eager on fresh random input
    chosen: bool
    reason: str
    streams: int | None = None  # most of any of its plans; None where nothing was planned


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Everything that a process needs to run the model without tracing it again, and how it was checked."""

    format_version: int = FORMAT_VERSION
    key: str
    program: Program
    plan: Plan
    facts: GraphFacts
    offsets: tuple[int | None, ...] = ()  # where each buffer begins in the arena, bytes; None: it lies elsewhere
    arena_bytes: int = 0
    durations_us: tuple[float, ...]  # measured time of each task alone, by task index; empty where nothing was measured
    kernels: str = "eager"  # whose kernels the tasks are: eager's, a library's or one of COMPILERS
    layout: str = "given"  # given | channels-last: of the module's four-dimensional weights
    folded: tuple[tuple[str, str], ...] = ()  # convolutions of the module, each with the normalisation folded into it
    merged: tuple[
        tuple[str, ...], ...
    ] = ()  # linear layers of the module that read the same, each group over one weight
    without: tuple[str, ...] = ()  # kernels of our own that were switched off where a compiler made the kernels
    compiled: tuple[CompiledKernel, ...] = ()  # of a compiler; empty: they must be compiled again
    binaries: str | None = None  # SHA-256 of the artifact that holds their machine code
    in_flight: int = 1  # instances that a worker keeps busy at once
    candidates: tuple[Candidate, ...]
    tolerance: float  # largest accepted relative norm
    error: float | None  # the relative norm that was found; None where it was not finite
    device: str  # the device in words
    eager_us: float  # median time of one eager call, microseconds
    replay_us: float  # median time of one replay, microseconds
    peak_bytes: int  # device memory of one instance beyond the module's state
    build_s: float
    runs: str = "schedule"  # schedule | eager: what was measured to be faster here, and is used
    noise: float | None = None  # share of the two times within which they count as equal; None: not timed in turns
    stages: tuple[tuple[str, float], ...] = ()  # of the search, each with its seconds
    taken_from: tuple[str, str] | None = None  # the sibling whose choice this took over: key, and its batch in words
    choices: tuple[TaskChoice, ...] = ()  # kinds of tasks that can run in several ways, and which was fastest

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces, the same text for equal values."""
        return json.dumps(_plain(self), sort_keys=True, separators=(",", ":"), allow_nan=False)

    def digest(self) -> str:
        """SHA-256 of the canonical JSON, in hex."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def sibling(self) -> dict[str, str] | None:
        """`taken_from` by name: the sibling's `key`, and its `batch` in words."""
        return None if self.taken_from is None else {"key": self.taken_from[0], "batch": self.taken_from[1]}

    def summary(self) -> dict[str, Any]:
        """What a job reports about its schedule, as JSON-able values."""
        return {
            "tasks": self.facts.tasks,
            "kernels": self.kernels,
            "layout": self.layout,
            "streams": self.plan.streams,
            "syncs": len(self.plan.syncs),
            "replay_us": self.replay_us,
            "eager_us": self.eager_us,
            "noise": self.noise,
            "error": self.error,
            "tolerance": self.tolerance,
            "peak_bytes": self.peak_bytes,
        }

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Inverse of `to_json`. Raises ValueError for any other text."""
        try:
            raw = json.loads(text)
            if raw["format_version"] != FORMAT_VERSION:
                raise ValueError(f"schedule format {raw['format_version']}, expected {FORMAT_VERSION}")
            return cls(
                **{
                    **raw,
                    "program": _program(raw["program"]),
                    "plan": Plan(
                        order=tuple(raw["plan"]["order"]),
                        stream_of=tuple(raw["plan"]["stream_of"]),
                        syncs=tuple(Sync(before=b, after=a) for b, a in raw["plan"]["syncs"]),
                    ),
                    "facts": GraphFacts(**raw["facts"]),
                    "offsets": tuple(raw["offsets"]),
                    "durations_us": tuple(raw["durations_us"]),
                    "folded": tuple((c, n) for c, n in raw["folded"]),
                    "merged": tuple(tuple(group) for group in raw.get("merged", ())),
                    "without": tuple(raw.get("without", ())),
                    "compiled": tuple(CompiledKernel(**{**k, "grid": tuple(k["grid"])}) for k in raw["compiled"]),
                    "candidates": tuple(Candidate(**c) for c in raw["candidates"]),
                    "stages": tuple((name, seconds) for name, seconds in raw["stages"]),
                    "taken_from": tuple(raw["taken_from"]) if raw.get("taken_from") else None,
                    "choices": tuple(TaskChoice.from_plain(choice) for choice in raw.get("choices", ())),
                }
            )
        except (KeyError, TypeError, IndexError, AttributeError) as e:
            raise ValueError(f"not a schedule: {type(e).__name__}: {e}") from e


def _plain(value: Any) -> Any:
    match value:
        case View() as v:
            return {"v": [v.buffer, v.dtype, v.itemsize, list(v.shape), list(v.stride), v.offset]}
        case Special():
            return {"s": [value.kind, value.value]}
        case Sync():
            return [value.before, value.after]
        case tuple() | list():
            return [_plain(v) for v in value]
        case float() if not math.isfinite(value):
            raise ValueError("a schedule holds finite numbers only; use Special(kind='float')")
        case _ if dataclasses.is_dataclass(value):
            # An older program can read the text, unless newer fields have values that it does not know.
            fields = [(f, getattr(value, f.name)) for f in dataclasses.fields(value)]
            return {f.name: _plain(v) for f, v in fields if "newer" not in f.metadata or v != f.default}
        case _:
            return value


def _arg(raw: Any) -> Arg:
    if isinstance(raw, list):
        return tuple(_arg(r) for r in raw)
    if isinstance(raw, dict):
        if "v" in raw:
            return _view(raw)
        return Special(kind=raw["s"][0], value=raw["s"][1])
    return raw  # type: ignore[no-any-return]  # None, bool, int, float, str


def _view(raw: Any) -> View:
    buffer, dtype, itemsize, shape, stride, offset = raw["v"]
    return View(buffer=buffer, dtype=dtype, itemsize=itemsize, shape=tuple(shape), stride=tuple(stride), offset=offset)


def _views(raw: Any) -> tuple[View, ...]:
    return tuple(_view(r) for r in raw)


def _program(raw: Any) -> Program:
    return Program(
        buffers=tuple(Buffer(**{**b, "kind": BufferKind(b["kind"])}) for b in raw["buffers"]),
        tasks=tuple(
            Task(
                **{
                    **t,
                    "args": tuple(_arg(a) for a in t["args"]),
                    "kwargs": tuple((name, _arg(a)) for name, a in t["kwargs"]),
                    "outputs": _arg(t["outputs"]),
                    "reads": _views(t["reads"]),
                    "writes": _views(t["writes"]),
                    "mutates": _views(t["mutates"]),
                }
            )
            for t in raw["tasks"]
        ),
        inputs=_ports(raw["inputs"]),
        state=_ports(raw["state"]),
        constants=_ports(raw["constants"]),
        outputs=_ports(raw["outputs"]),
    )


def _ports(raw: Any) -> tuple[Port, ...]:
    return tuple(Port(name=p["name"], view=_view(p["view"])) for p in raw)
