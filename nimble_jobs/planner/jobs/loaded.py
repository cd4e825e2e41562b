"""A model on the device with its captured schedule, and the place where a worker keeps several of them."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from nimble_jobs.data.buffers import Buffers
from nimble_jobs.engine.arrivals import Arrivals, Arrived
from nimble_jobs.engine.capture import Instance
from nimble_jobs.engine.compact import state_bytes
from nimble_jobs.engine.device import able, allocated_bytes
from nimble_jobs.engine.flight import Flight, Landed
from nimble_jobs.engine.held import Held
from nimble_jobs.engine.landings import Landings
from nimble_jobs.engine.observe import Observed
from nimble_jobs.engine.pinned import pin
from nimble_jobs.engine.record import flatten_outputs
from nimble_jobs.engine.tail import Head
from nimble_jobs.errors import OutOfMemory
from nimble_jobs.graph.pause import collector_paused
from nimble_jobs.models.build import build
from nimble_jobs.models.call_arguments import call_of
from nimble_jobs.models.embedding import WithEmbedding
from nimble_jobs.models.from_exported import check_sizes
from nimble_jobs.models.packed import Packed
from nimble_jobs.models.pooled import Pooled
from nimble_jobs.models.preprocessed import Preprocessed
from nimble_jobs.planner.forward.further import Further
from nimble_jobs.planner.jobs.origin import Origin
from nimble_jobs.planner.keys.request import Request, resident_key
from nimble_jobs.planner.module.carried import Carried
from nimble_jobs.planner.module.limits import Limits
from nimble_jobs.schedule import Schedule
from nimble_jobs.spec import parse_source

T = TypeVar("T")
Report = Callable[..., None]  # is given the phase of a preparation, and the candidate that is tried

BUFFERS, _FEWEST_BUFFERS = 8, 6  # of the host: one is read, two wait, two are uploaded
_BUFFER_BYTES = 2 << 30  # in all, unless the fewest buffers need more
_MORE_BYTES = 512 << 20  # the same for more than `BUFFERS` buffers


class Resident(Protocol):
    """Something that occupies device memory until it is closed."""

    @property
    def key(self) -> str: ...

    @property
    def bytes(self) -> int: ...

    def close(self) -> None: ...


class Residents(Protocol):
    """What a worker keeps on its device between jobs."""

    def get(self, key: str) -> Any:
        """The value kept under `key`, now the most recently used; None if there is none."""

    def put(self, key: str, value: Any) -> None:
        """Keep `value` (a Resident); may close others."""

    def drop(self, key: str) -> None:
        """Close the value under `key` and keep it no longer."""

    def make_room(self, nbytes: int) -> None:
        """Close others, least recently used first, until `nbytes` more fit the budget."""

    def several(self) -> AbstractContextManager[Callable[[], None]]:
        """A block in which several values are put. Others are told of them together, or when the function is called."""


@dataclass(eq=False)
class Siblings:
    """Models that share their weights on the device, and differ only in the packing of their batches.

    No schedule of one may move the weights, because the graphs of the others read them.
    """

    first: Packed | None = None  # the first one's module; None: not made yet
    carried: Carried | None = None  # the shared model as it was before its first batch
    origin: Origin = field(default_factory=Origin)  # the shared model's
    facts: Mapping[str, str] | None = None  # of the device, before the model's code ran; None: not noted yet
    steady: bool = False  # whether the check of a stored schedule was watched, and left no traces in the model
    # Copies with folded or merged weights, by which of them are. Schedules that need the same copy share it.
    variants: weakref.WeakValueDictionary[Hashable, Packed] = field(default_factory=weakref.WeakValueDictionary)
    members: weakref.WeakSet[Loaded] = field(default_factory=weakref.WeakSet)
    # Shares of a batch's time in eager on a GPU: of its kernels without gaps, and of the call. None: not measured.
    shares: tuple[float, float] | None = None


@dataclass(kw_only=True, eq=False)
class Loaded:
    """A module on its device, with a captured schedule or the reason why it runs in eager. It has neither if its
    schedule says that eager is faster.
    """

    key: str
    request: Request
    device: torch.device
    module: nn.Module  # whose weights the instances read
    origin: Origin = field(default_factory=Origin)
    instances: tuple[Instance, ...] = ()
    further: Further | None = None  # captures more of them, once replays have to wait for each other
    schedule: Schedule | None = None
    fallback: str | None = None
    spared: str | None = None  # why a stored schedule is not loaded for this job
    limits: Limits | None = None  # of the integers that it takes; None: not looked for yet
    observed: Observed | None = None  # what the module was before its first call
    carried: Carried | None = None  # the same, for a module that runs in eager or may have to
    uncalled: Held | None = None  # what the module holds, until it may have been called
    provisional: bool = False  # an earlier job left it without a schedule; the next job may continue with it
    unschedulable: bool = False  # no schedule can hold what the model does
    siblings: Siblings | None = None  # who share its weights; None: nobody does

    _counted: tuple[weakref.ref[nn.Module], int] | None = None  # a module, and the bytes of its state
    _flight: Flight | None = None
    _staging_bytes: int = 0  # device memory of the flight
    _arrivals: Arrivals | None = None
    _arrival_bytes: int = 0
    _buffers: Buffers | None = None

    @property
    def ready(self) -> bool:
        """Whether it runs in the fastest way: by its schedule, or in eager because that was measured to be faster."""
        return bool(self.instances) or (self.schedule is not None and self.fallback is None)

    @property
    def undecided(self) -> bool:
        """Whether it runs in eager only because nothing has been built yet."""
        return not self.instances and self.schedule is None and self.fallback is None and self.spared is None

    @property
    def bytes(self) -> int:
        """Device memory of the module's state, of the instances with those that may come, and of the copies beside them
        once `take_off` made them; as they were measured.
        """
        if self._counted is None or self._counted[0]() is not self.module:
            self._counted = (weakref.ref(self.module), state_bytes(self.module))
        weights = self._counted[1] // (max(1, len(self.siblings.members)) if self.siblings is not None else 1)
        further = self.further.bytes if self.further is not None else 0
        return weights + sum(i.bytes for i in self.instances) + further + self._staging_bytes + self._arrival_bytes

    @property
    def in_flight(self) -> int:
        """How many batches can be computed at a time."""
        more = len(self.further.made) + self.further.left if self.further is not None else 0
        return max(1, len(self.instances) + more)

    def every_instance(self) -> tuple[Instance, ...]:
        """All instances, with those that had not been captured yet."""
        if self.further is None:
            return self.instances
        while self.further.take(lambda made: made) is not None:
            pass
        return (*self.instances, *self.further.made)

    def take_off(self) -> Flight | None:
        """What carries batches through the instances, made once; None if they run one by one, on the host."""
        if self._flight is None and self.instances and able(self.device).streams:
            before = allocated_bytes(self.device)
            made, another, left = ((), None, 0) if (f := self.further) is None else (f.made, f.take, f.left)
            self._flight = Flight.of_replays((*self.instances, *made), self.device, another=another, left=left)
            self._staging_bytes = allocated_bytes(self.device) - before
        return self._flight

    @property
    def arrivals(self) -> Arrivals:
        """Where batches arrive ahead of their replays, made once; other instances of the request take from it, too."""
        if self._arrivals is None:
            kind = self.request.input_dtype
            self._arrivals = Arrivals(self.request.input_shape, kind, self.device, in_flight=self.in_flight)
            self._arrival_bytes = self._arrivals.bytes
        return self._arrivals

    def buffers(self, nbytes: int, count: int = BUFFERS) -> Buffers:
        """Host memory for batches, as `batch_buffers` makes it; kept for later jobs, which cut it anew."""
        kept, self._buffers = self._buffers, None
        if kept is not None and not kept.recut(number_of_buffers(nbytes, count), nbytes):
            kept.close()
            kept = None
        self._buffers = kept or batch_buffers(nbytes, count, self.device)
        return self._buffers

    def keep_buffers(self, buffers: Buffers) -> None:
        """Take over what `buffers` would otherwise make; not needed if it has been made."""
        if self._buffers is None:
            self._buffers = buffers
        else:
            buffers.close()

    def make_ready(self, head: Head) -> None:
        """Capture what `run` needs for `head`. Best before other threads use the device, since a capture waits for all
        of it. Raises what `head` raises, and EngineError.
        """
        flight = self.take_off()
        if flight is not None:
            flight.prepare(head)

    def run(
        self, arrived: Iterable[tuple[Arrived | None, T]], head: Head = dict, landings: Landings | None = None
    ) -> Generator[Landed[T]]:
        """What `head` makes of the outputs of each batch, on the host, in order; nothing for None.

        Whoever takes them releases each; at most two may be held at a time. On a device that copies results to the
        host, they come to `landings`, which may be kept for further runs, also of other models.
        """
        flight = self.take_off()
        if flight is None and able(self.device).streams:
            flight = Flight.of_calls(self.module, self.device)
        if flight is not None:
            yield from flight.run(arrived, head, landings)
            return
        for batch, beside in arrived:
            if batch is None:
                yield Landed(outputs={}, beside=beside)
                continue
            began = time.perf_counter()
            with torch.no_grad():
                # A short batch takes less time in eager than a whole one takes in a replay.
                replays = self.instances and len(batch.x) == self.request.batch_size
                outputs = self._replayed(batch) if replays else self._in_eager(batch)
                # A copy: the model may write over its outputs when it is called again.
                made = {n: t.to("cpu", copy=True) for n, t in head(outputs).items()}
            yield Landed(outputs=made, beside=beside, replay_s=time.perf_counter() - began)

    def _replayed(self, batch: Arrived) -> Mapping[str, torch.Tensor]:
        instance = self.instances[0]
        next(iter(instance.inputs.values())).copy_(batch.x)
        batch.release()
        instance.replay()
        return instance.outputs

    def _in_eager(self, batch: Arrived) -> Mapping[str, torch.Tensor]:
        return flatten_outputs(self.module(batch.x.to(self.device, self.request.input_dtype)))

    def put_back(self) -> bool:
        """Undo what batches have written into the module's state; False if that cannot be done."""
        if self.instances and self.observed is not None:
            if self.observed.changing:
                self.observed.put_back()
            return True
        return self.carried is not None and self.carried.put_back()

    def altered(self) -> str | None:
        """The name of a part of the module's state that batches have changed; None if all is as it was at first."""
        if self.instances and self.observed is not None:
            return next(iter(self.observed.changing), None)
        return self.carried.altered() if self.carried is not None else None

    def release(self) -> None:
        """Close the instances; the module stays."""
        for instance in self.instances:
            instance.close()
        if self.further is not None:
            self.further.close()
        self.instances, self.further = (), None
        self._flight, self._staging_bytes = None, 0

    def close(self) -> None:
        self.release()
        self.observed = self.carried = self.uncalled = None  # they refer to the weights
        self._arrivals, self._arrival_bytes = None, 0
        if self._buffers is not None:
            self._buffers.close()
            self._buffers = None
        self.module = nn.Identity()
        if self.siblings is not None:
            self.siblings.members.discard(self)


def build_module(request: Request, device: torch.device, like: Packed | None = None) -> nn.Module:
    """The request's module on the device. With `like`, whose request differs in its packing only, it shares the model
    inside. Raises ModelError, OutOfMemory.
    """
    if like is not None:
        assert request.packing is not None
        return like.packed_as(request.packing, request.model_dtype, device)
    try:
        with collector_paused():
            headless = request.pooling is not None
            allowed = request.allowed_python
            module = build(request.model, device=str(device), allowed_python=allowed, headless=headless)
    except torch.OutOfMemoryError as e:
        raise OutOfMemory(f"not enough memory on {device} for the model's weights: {e}") from e
    packing, call = request.packing, None
    alone = packing is None and request.preprocess is None
    texts = packing is not None and any(part.is_made for part in packing.parts)
    shape = request.shape if alone else None
    check_sizes(module, request.model.source, request.batch_size, shape, texts=texts)
    if packing is not None:
        call = call_of(module, [part.path for part in packing.parts])
    if request.embedding:
        module = WithEmbedding(module)
    if request.pooling is not None:
        module = Pooled(module, request.pooling, Path(parse_source(request.model.source).target)).to(device)
    if packing is not None:
        return Packed(module, packing, request.model_dtype, device, call)
    if request.preprocess is not None:
        module = Preprocessed(module, request.preprocess, request.model_dtype, device)
    return module


def keep_resident(loaded: Loaded, residents: Residents) -> None:
    """Let a loaded model stay on the device for later jobs, with the copies beside it, which count in the budget."""
    if loaded.instances:
        loaded.take_off()
        _ = loaded.arrivals
    residents.put(resident_key(loaded.key, loaded.request), loaded)


def batch_buffers(nbytes: int, count: int, device: torch.device) -> Buffers:
    """Host memory for a scoring job's batches of `nbytes`, pinned if `device` copies from it. The caller closes it.

    It has `count` buffers, or fewer if they are large.
    """
    return pinned_buffers(nbytes, number_of_buffers(nbytes, count), device)


def number_of_buffers(nbytes: int, count: int) -> int:
    """How many buffers `batch_buffers` makes."""
    few = as_many(nbytes, most=BUFFERS, fewest=_FEWEST_BUFFERS, limit_bytes=_BUFFER_BYTES)
    return as_many(nbytes, most=max(count, few), fewest=few, limit_bytes=_MORE_BYTES)


def as_many(nbytes: int, *, most: int, fewest: int, limit_bytes: int) -> int:
    """How many buffers of `nbytes` fit into `limit_bytes`, but from `fewest` to `most`."""
    return max(fewest, min(most, limit_bytes // max(1, nbytes)))


def pinned_buffers(nbytes: int, count: int, device: torch.device) -> Buffers:
    """`count` buffers of `nbytes` on the host, pinned if `device` copies from host memory. The caller closes them."""
    buffers = Buffers(count, nbytes)
    pin(buffers.memory, device)
    return buffers
