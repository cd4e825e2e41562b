"""What a program writes that is the caller's: inputs, and the state of the module."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from nimble_jobs.engine.record import state_of
from nimble_jobs.graph import writes
from nimble_jobs.nimble.signature import Signature
from nimble_jobs.nimble.surroundings import Unfit
from nimble_jobs.schedule import Program


def written_inputs(program: Program) -> tuple[str, ...]:
    """Names of the inputs that a program writes into."""
    return writes.names_written(program, program.inputs)


def names_written(program: Program) -> tuple[str, ...]:
    """Names of the state that a program writes into."""
    return writes.names_written(program, program.state)


def meeting_state(module: nn.Module, program: Program) -> dict[str, torch.Tensor]:
    """The module's own tensors, by name, that no input may share memory with: those that the program writes into, and
    all that it knows if it writes into an input.
    """
    names = {port.name for port in program.state} if written_inputs(program) else set(names_written(program))
    return {name: tensor for name, tensor in state_of(module).items() if name in names}


def refuse_shared(
    signature: Signature,
    tensors: Sequence[torch.Tensor],
    written: Sequence[str],
    state: Mapping[str, torch.Tensor],
) -> None:
    """Raises Unfit, naming both, if a tensor that the program writes into shares bytes with another one, be
    it an input named in `written` or part of the module's own, of which `state` holds what `meeting_state` says.

    A replay works on copies of its inputs, so the other would not see what is written.
    """
    if not written and not state:
        return
    named = list(zip((slot.name for slot in signature.tensors), tensors, strict=True))
    for (one, first), (other, second) in itertools.combinations(named, 2):
        if (one in written or other in written) and _overlap(first, second):
            raise Unfit(
                f"{one} and {other}: share memory, and the model writes into {one if one in written else other}; "
                "expected tensors with bytes of their own"
            )
    for (one, first), (own, second) in itertools.product(named, state.items()):
        if _overlap(first, second):
            raise Unfit(
                f"{one}: shares memory with the module's own {own!r}, and the model writes into "
                f"{'the argument' if one in written else 'that'}; expected a copy"
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
