"""A model on the device with its captured schedule, and the place where a worker keeps several of them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from nimble_jobs.engine.capture import Instance
from nimble_jobs.engine.flight import Flight
from nimble_jobs.engine.observe import Observed
from nimble_jobs.engine.record import flatten_outputs, state_of
from nimble_jobs.planner.carried import Carried
from nimble_jobs.planner.limits import Limits
from nimble_jobs.planner.request import Request
from nimble_jobs.schedule import Schedule

T = TypeVar("T")


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
        """The value kept under `key`, now the most recently used; None where there is none."""

    def put(self, key: str, value: Any) -> None:
        """Keep `value` (a Resident); may close others."""

    def make_room(self, nbytes: int) -> None:
        """Close others, least recently used first, until `nbytes` more fit the budget."""


def state_bytes(module: nn.Module) -> int:
    """Memory of a module's parameters and buffers; what several share counts once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in state_of(module).values()}
    return sum(storages.values())


@dataclass(kw_only=True)
class Loaded:
    """A module on its device, with a captured schedule or, where there is none, the reason why it runs in eager. One
    whose schedule says that eager is faster has neither.
    """

    key: str
    request: Request
    device: torch.device
    module: nn.Module  # whose weights the instances read
    instances: tuple[Instance, ...] = ()
    schedule: Schedule | None = None
    fallback: str | None = None
    limits: Limits | None = None  # of the whole numbers that it takes, once they were looked for
    observed: Observed | None = None  # what the module was before its first call
    carried: Carried | None = None  # the same, of a module that runs in eager or may come to
    unschedulable: bool = False  # no schedule can hold what the model does, so there is none to wait for

    _counted: tuple[weakref.ref[nn.Module], int] | None = None  # the module whose state has so many bytes
    _flight: Flight | None = None
    _staging_bytes: int = 0  # that the flight took on the device

    @property
    def ready(self) -> bool:
        """Whether it runs as is best here: by its schedule, or in eager because that is faster."""
        return bool(self.instances) or (self.schedule is not None and self.fallback is None)

    @property
    def bytes(self) -> int:
        """Device memory of the module's state, of the instances, and of the copies beside them once `take_off` made
        them; as they were measured.
        """
        if self._counted is None or self._counted[0]() is not self.module:
            self._counted = (weakref.ref(self.module), state_bytes(self.module))
        return self._counted[1] + sum(i.bytes for i in self.instances) + self._staging_bytes

    def take_off(self) -> Flight:
        """What carries batches through the instances, made once."""
        if self._flight is None:
            before = _allocated(self.device)
            self._flight = Flight(self.instances, self.device)
            self._staging_bytes = _allocated(self.device) - before
        return self._flight

    def run(self, batches: Iterable[tuple[torch.Tensor, T]]) -> Iterator[tuple[dict[str, torch.Tensor], T]]:
        """Outputs by name of each whole batch of shape `request.input_shape`, with what came beside it, in order.

        Outputs are valid until the next ones are asked for.
        """
        if self.instances:
            yield from self.take_off().run(batches)
            return
        for x, beside in batches:
            with torch.no_grad():
                outputs = flatten_outputs(self.module(x.to(self.device, self.request.input_dtype)))
            yield outputs, beside

    def begin(self) -> bool:
        """Put back what earlier batches have written into the module's state; False where that cannot be done."""
        if self.instances and self.observed is not None:
            if self.observed.changing:
                self.observed.put_back()
            return True
        return self.carried is not None and self.carried.put_back()

    def altered(self) -> str | None:
        """The name of something of the module's that batches leave otherwise than it was before the first of them."""
        if self.instances and self.observed is not None:
            return next(iter(self.observed.changing), None)
        return self.carried.altered() if self.carried is not None else None

    def release(self) -> None:
        """Close the instances; the module stays."""
        for instance in self.instances:
            instance.close()
        self.instances = ()
        self._flight, self._staging_bytes = None, 0

    def close(self) -> None:
        self.release()
        self.module = nn.Identity()


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
