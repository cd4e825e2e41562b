"""A model on the device with its captured schedule, and the place where a worker keeps several of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from nimble_jobs.engine.capture import Instance
from nimble_jobs.engine.record import flatten_outputs, state_of
from nimble_jobs.planner.request import Request
from nimble_jobs.schedule import Schedule


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


@dataclass(kw_only=True)
class Loaded:
    """A module on its device, with a captured schedule or, where there is none, the reason why it runs in eager."""

    key: str
    request: Request
    device: torch.device
    module: nn.Module
    instance: Instance | None = None
    schedule: Schedule | None = None
    fallback: str | None = None

    @property
    def bytes(self) -> int:
        """Device memory of the module's state and the instance."""
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in state_of(self.module).values()
        }
        return sum(storages.values()) + (self.instance.bytes if self.instance is not None else 0)

    def __call__(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Outputs by name for a whole batch of shape `request.input_shape`, valid until the next call."""
        if self.instance is not None:
            self.instance.inputs["x"].copy_(x)
            self.instance.replay()
            return self.instance.outputs
        with torch.no_grad():
            return flatten_outputs(self.module(x.to(self.device, self.request.input_dtype)))

    def close(self) -> None:
        if self.instance is not None:
            self.instance.close()
        self.instance = None
        self.module = nn.Identity()
