"""How a call's tensors lie in memory, for models on which that has an influence."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from nimble_jobs.engine.recorder import Recording
from nimble_jobs.errors import CannotRecord, NimbleError, first_line
from nimble_jobs.nimble.signature import Signature
from nimble_jobs.nimble.surroundings import Unfit
from nimble_jobs.nimble.writes import written_inputs


@contextlib.contextmanager
def refusing_copies(module: nn.Module, signature: Signature, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Around a call with copies of the example: raises CannotRecord if the model fails only for them, since they lie
    otherwise.
    """
    try:
        yield
    except (NimbleError, torch.OutOfMemoryError):
        raise
    except Exception as e:
        with torch.no_grad():  # what it raises for the example itself comes through
            args, kwargs = signature.arguments(tuple(copy.deepcopy([t.detach() for t in tensors])))
            module(*args, **kwargs)
        raise CannotRecord(f"the model fails for a copy of its example: {first_line(e)}") from e


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """Strides and offsets that each call's tensors must have, and why."""

    signature: Signature
    expected: tuple[tuple[tuple[int, ...], int], ...]
    reason: str

    @classmethod
    def of(cls, signature: Signature, tensors: Sequence[torch.Tensor], recording: Recording) -> Layouts | None:
        """None if any layout will do: the model neither asks for it nor writes into its inputs, of which some views
        are copies in another layout.

        Raises CannotRecord if the example lies in a way that a schedule's own copy of it cannot.
        """
        written = written_inputs(recording.program)
        if recording.layout_question is None and not written:
            return None
        asks = f"the model asks for a layout ({recording.layout_question})"
        reason = f"the model writes into {written[0]}" if recording.layout_question is None else asks
        expected = tuple((t.stride(), int(t.storage_offset())) for t in tensors)
        for slot, tensor, (strides, offset) in zip(signature.tensors, tensors, expected, strict=True):
            own = torch.empty_like(tensor)
            if recording.layout_question is not None and (own.stride(), own.storage_offset()) != (strides, offset):
                raise CannotRecord(
                    f"{slot.name} has strides {list(strides)} and offset {offset}, which a copy of it does not have, "
                    f"and {reason}"
                )
        if recording.layout_question is None:
            expected = tuple((strides, -1) for strides, _ in expected)
        return cls(signature=signature, expected=expected, reason=reason)

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raises Unfit, naming the argument, if one lies otherwise than the example's."""
        for slot, tensor, (strides, offset) in zip(self.signature.tensors, tensors, self.expected, strict=True):
            if tensor.stride() != strides or offset not in (-1, tensor.storage_offset()):
                found = f"strides {list(tensor.stride())} and offset {tensor.storage_offset()}"
                expected = f"strides {list(strides)}" + (f" and offset {offset}" if offset >= 0 else "")
                raise Unfit(f"{slot.name}: found {found}; expected {expected}, since {self.reason}")
