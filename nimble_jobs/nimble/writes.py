"""What a program writes that is the caller's: inputs, and the state of the module."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from nimble_jobs.errors import UsageError
from nimble_jobs.graph import writes
from nimble_jobs.nimble.signature import Signature
from nimble_jobs.schedule import Program


def written_inputs(program: Program) -> tuple[str, ...]:
    """Names of the inputs that a program writes into."""
    return writes.names_written(program, program.inputs)


def names_written(program: Program) -> tuple[str, ...]:
    """Names of the state that a program writes into."""
    return writes.names_written(program, program.state)


def refuse_shared(signature: Signature, tensors: Sequence[torch.Tensor], written: Sequence[str]) -> None:
    """Raises UsageError, naming both, where a tensor that the program writes into shares bytes with another one.

    A replay works on copies, so the other would not see what is written.
    """
    if not written:
        return
    named = zip((slot.name for slot in signature.tensors), tensors, strict=True)
    for (one, first), (other, second) in itertools.combinations(named, 2):
        if (one in written or other in written) and _overlap(first, second):
            raise UsageError(
                f"{one} and {other}: share memory, and the model writes into {one if one in written else other}; "
                "expected tensors with bytes of their own"
            )


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    (start, end), (begin, stop) = _span(one), _span(other)
    return one.device == other.device and max(start, begin) < min(end, stop)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Smallest range [start, end) of addresses that holds every element."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()
