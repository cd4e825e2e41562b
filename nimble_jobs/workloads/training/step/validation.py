"""Validations between steps: loss and accuracy on held-out records, by the live weights in evaluation mode.

The forward pass is replayed from a schedule if there is one, and runs in eager otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from nimble_jobs.data import BadRecord
from nimble_jobs.engine.capture import Instance
from nimble_jobs.engine.device import able
from nimble_jobs.engine.record import flatten_outputs
from nimble_jobs.errors import DataError, DeviceFault, EngineError
from nimble_jobs.planner.module.restoring import restoring_state
from nimble_jobs.planner.step.request import Loss
from nimble_jobs.planner.step.validation import PreparedForward
from nimble_jobs.workloads.bad_records import enforce_threshold
from nimble_jobs.workloads.context import Event, Stop
from nimble_jobs.workloads.heads import logits_of
from nimble_jobs.workloads.training.batches.together import Joint
from nimble_jobs.workloads.training.ranks.gang import Gang
from nimble_jobs.workloads.training.step.f1 import F1
from nimble_jobs.workloads.training.step.losses import takes_names
from nimble_jobs.workloads.training.step.setup import Setup, autocast, evaluating


def replayable(device: torch.device) -> bool:
    """Whether validations on this device may be replayed from a schedule. Without graphs, that would save nothing."""
    return able(device).graphs


class Forward:
    """Calls the module: in eager until `capture`, and afterwards for batches of another shape."""

    def __init__(self, module: nn.Module, dtype: str, *, by_name: bool = True) -> None:
        """`by_name`: whoever reads the outputs takes several of them by name, as our own losses do."""
        self._module = module
        self._dtype = dtype
        self._by_name = by_name
        self._one = True  # the module returns a tensor, not a container
        self._instance: Instance | None = None
        self._x: torch.Tensor | None = None

    @classmethod
    def of(cls, setup: Setup) -> Forward:
        """The forward pass of the training's module."""
        assert setup.spec.train is not None
        return cls(setup.module, setup.spec.model.dtype, by_name=takes_names(setup.spec.train.loss))

    @property
    def replays(self) -> bool:
        return self._instance is not None

    def capture(self, x: torch.Tensor, prepare: Callable[[nn.Module], PreparedForward]) -> PreparedForward | str:
        """Replay batches like `x` from now on, or say why that is not possible.

        `prepare` gets a module that returns the outputs by name. Weights stay in place. Raises DeviceFault, and any
        error of `prepare` that is not an EngineError.
        """
        whole = _Outputs(self._module, self._dtype)
        try:
            with restoring_state(self._module, x.device), evaluating(self._module), torch.inference_mode(False):
                self._one = isinstance(self._module(x), torch.Tensor)
                if not self._one and not self._by_name:
                    return "the model returns a container of tensors, which a replay cannot rebuild for your train.loss"
                prepared = prepare(whole)
        except DeviceFault:
            raise
        except (EngineError, torch.OutOfMemoryError) as e:
            return str(e)
        self._instance = prepared.instance
        if self._instance is not None:
            self._x = next(iter(self._instance.inputs.values()))
        return prepared

    def __call__(self, x: torch.Tensor) -> Any:
        """What the module returns, valid until the next call; where it is replayed, a container's tensors by name. The
        module is in evaluation mode.
        """
        if self._instance is None or self._x is None or x.shape != self._x.shape:
            with autocast(self._dtype, x.device):
                return self._module(x)
        self._x.copy_(x, non_blocking=True)
        self._instance.replay()
        outputs = self._instance.outputs
        return next(iter(outputs.values())) if self._one else dict(outputs)

    def close(self) -> None:
        """Free the schedule's memory."""
        if self._instance is not None:
            self._instance.close()
        self._instance = self._x = None


class SeveralForwards:
    """Calls the module for each batch through the `Forward` whose records have as many values as the batch's."""

    def __init__(self, forwards: Mapping[int, Forward]) -> None:
        """`forwards` by the number of values of a record."""
        self.by_width = dict(forwards)

    @property
    def replays(self) -> bool:
        """Whether any of them does."""
        return any(forward.replays for forward in self.by_width.values())

    def __call__(self, x: torch.Tensor) -> Any:
        """Call the forward pass for records of this width."""
        return self.by_width[x.shape[-1]](x)

    def close(self) -> None:
        """Free the schedules' memory."""
        for forward in self.by_width.values():
            forward.close()


class Validation:
    """Measures loss and accuracy on the held-out records, once for each call."""

    def __init__(
        self,
        setup: Setup,
        forward: Forward | SeveralForwards,
        loss: Loss,
        *,
        records: int,
        event: Event,
        gang: Gang | None = None,
    ) -> None:
        """`records` counts the held-out ones. `event` records bad ones on the job. With a `gang`, each rank validates
        on its share, and all get the same measures.
        """
        self.setup, self.forward, self.records = setup, forward, records
        self._loss, self._event, self._gang = loss, event, gang
        self._bad = 0  # in the last validation

    def __call__(self, batches: Iterable[Joint], stop: Callable[[], Stop]) -> dict[str, float | None] | Stop:
        """val_loss and, for classes, val_accuracy: means over all good records; None if not finite. For classes of
        texts also val_f1, as `F1` says.

        `stop` is asked before each batch; if it is not GO, it is returned instead. Raises DataError if there is no good
        record, or if there are too many bad ones.
        """
        setup = self.setup
        device, dtype = setup.device, setup.request.precision
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        right = torch.zeros((), dtype=torch.int64, device=device)
        seen = 0
        f1 = F1(len(setup.names), device) if setup.names else None
        with evaluating(setup.module):
            for batch in self._counted(batches):
                if (wish := stop()) is not Stop.GO:
                    return wish
                own = batch.own
                if own is None:
                    continue
                with autocast(dtype, device):
                    outputs = self.forward(own.x)
                    loss_sum += self._loss(outputs, own.y).double() * len(own.y)
                if setup.classes is not None:
                    top1 = logits_of(flatten_outputs(outputs)).argmax(1)
                    right += (top1 == own.y).sum()
                    if f1 is not None:
                        f1.count(top1, own.y)
                seen += len(own.y)
        total, right_ones, seen = self._summed(float(loss_sum), int(right), seen)
        if not seen:
            raise DataError("train.validation.source: no good record to validate on; expected at least one")
        loss = total / seen
        measured: dict[str, float | None] = {"val_loss": loss if math.isfinite(loss) else None}
        if setup.classes is not None:
            measured["val_accuracy"] = right_ones / seen
        if f1 is not None:
            measured["val_f1"] = f1.value()
        return measured

    def _summed(self, loss: float, right: int, seen: int) -> tuple[float, int, int]:
        """The same sums over all ranks, in their order."""
        if self._gang is None:
            return loss, right, seen
        losses, rights, counts = zip(*self._gang.gather([loss, right, seen]), strict=True)
        return math.fsum(losses), sum(rights), sum(counts)

    def _counted(self, batches: Iterable[Joint]) -> Iterator[Joint]:
        """The same batches. The first validation with bad records says so in an event. Raises DataError."""
        bad: list[BadRecord] = []
        for batch in batches:
            if batch.host.bad:
                bad += batch.host.bad
                enforce_threshold(self.setup.spec.run, len(bad), self.records, bad, what="held-out records")
            yield batch
        if bad and not self._bad:
            first = f"the first is {bad[0].id}: {bad[0].reason}"
            text = f"validations leave out {len(bad)} of {self.records} records; {first}"
            self._event("bad-records", text, {"bad": len(bad)})
        self._bad = len(bad)


class _Outputs(nn.Module):
    """The module's outputs by name, which is what the recorder takes."""

    def __init__(self, module: nn.Module, dtype: str) -> None:
        super().__init__()
        self.module = module
        self._dtype = dtype
        self.train(module.training)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        with autocast(self._dtype, x.device):
            return flatten_outputs(self.module(x))
