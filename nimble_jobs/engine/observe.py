"""What a model's calls do, seen from outside: called a few times in eager before anything is recorded.

Refuses what no replay could repeat: attributes that change from call to call, random numbers of Python and numpy,
outputs that are no tensors and depend on the input, and first calls that are unlike the later ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nimble_jobs.engine.memory import is_dense
from nimble_jobs.engine.private.runtime import forget_compiled
from nimble_jobs.engine.state import RandomStates, Snapshot, attributes, same_bytes, tensors_in
from nimble_jobs.engine.tree import has_own_names, named_leaves
from nimble_jobs.errors import CannotRecord

_SLACK = 5e-2  # of two eager calls on the same input, whose sums a device may add in another order

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Observed:
    """A module between calls, and what its calls change."""

    result: Any  # of the call with the example
    snapshot: Snapshot
    random: RandomStates
    changing: dict[str, torch.Tensor]  # tensors of the module that a call leaves with other values

    def put_back(self) -> None:
        """Tensors and random states as they were before the first call. What calls keep for later ones stays."""
        self.snapshot.put_back_values()
        self.random.put_back()


class Watched:
    """A module whose calls somebody else needs, and whether they leave a trace. Called like the module.

    Traces are whatever is not as it was when this was made: tensors, their values, attributes, modes, random numbers of
    Python and numpy. A module whose calls leave none is between them what it always is, and need not be observed first.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.left_traces = False
        self._module = module
        self._snapshot, self._random = Snapshot(module), RandomStates(device)
        self._attributes, self._tensors = attributes(module), _identities(module)

    def __call__(self, *inputs: torch.Tensor) -> Any:
        try:
            with self._snapshot.watching():
                result = self._module(*inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            self.left_traces = True  # it may be the mode that the model cannot stand
            raise
        self.left_traces = self.left_traces or self._differs()
        return result

    @property
    def observed(self) -> Observed:
        """What `observe` would have found of a module that leaves no traces, but for the outputs."""
        return Observed(result=None, snapshot=self._snapshot, random=self._random, changing={})

    def put_back(self) -> None:
        """Give the module all that it held, and the random states theirs."""
        self._snapshot.put_back()
        self._random.put_back()

    def _differs(self) -> bool:
        return (
            self._random.changed() is not None
            or self._snapshot.nests
            or _identities(self._module) != self._tensors
            or attributes(self._module) != self._attributes
            or bool(self._snapshot.changing(containers=True))
        )


def _identities(module: nn.Module) -> dict[str, int]:
    """Which tensors a module holds where."""
    return {name: id(tensor) for name, tensor in tensors_in(module).items()}


def observe(module: nn.Module, example: Tensors, others: Sequence[Tensors], device: torch.device) -> Observed:
    """Call a module with an example and with inputs like it; its tensors and the random states are then as before.

    What it raises for the example comes through; others that it raises for tell nothing. Raises CannotRecord.
    """
    snapshot, states = Snapshot(module), RandomStates(device)
    try:
        return _observed(module, example, others, snapshot, states)
    finally:
        snapshot.put_back_values()
        states.put_back()


def _observed(
    module: nn.Module, example: Tensors, others: Sequence[Tensors], snapshot: Snapshot, states: RandomStates
) -> Observed:
    before = tensors_in(module)
    modes = {name: m.training for name, m in module.named_modules()}
    first = _called(module, example, snapshot)
    refuse_random(states)
    snapshot.refuse_resized()
    snapshot.refuse_nested()
    named = _leaves(first)
    refuse_modes(modes, module)
    made = {n: t for n, t in tensors_in(module).items() if n not in before}
    values = {n: t.detach().clone() for n, t in made.items()}
    kept = attributes(module)
    changing = snapshot.changing()
    snapshot.put_back_values()
    states.put_back()
    again = _leaves(_called(module, example))
    refuse_advance(kept, attributes(module))
    _refuse_other(named, again, "its first call", "the next one, on the same input")
    now = tensors_in(module)
    _refuse_cached(module, {n: values[n] for n, t in made.items() if now.get(n) is t}, example, others, snapshot)
    states.put_back()
    for inputs in others:
        try:
            found = _leaves(_called(module, inputs))
        except Exception:  # noqa: BLE001 - it may be unfit for the model: the example is not
            snapshot.put_back_values()
            continue
        refuse_advance(kept, attributes(module))
        _refuse_other(named, found, "one input", "another")
        changing |= snapshot.changing()
    refuse_random(states)
    return Observed(result=first, snapshot=snapshot, random=states, changing=changing)


def _called(module: Callable[..., Any], inputs: Tensors, snapshot: Snapshot | None = None) -> Any:
    given = [t.clone() for t in inputs.values()]  # the model may write into what it is given
    with torch.no_grad():
        if snapshot is None:
            result = module(*given)
            _refuse_resized(inputs, given)
            return result
        try:
            with snapshot.watching():
                return module(*given)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # noqa: BLE001 - it may be the mode that the model cannot stand; what is the model's own
            snapshot.put_back()  # is raised again
            forget_compiled()
            return module(*(t.clone() for t in inputs.values()))


def _refuse_resized(inputs: Tensors, given: Sequence[torch.Tensor]) -> None:
    for (name, before), tensor in zip(inputs.items(), given, strict=True):
        if tensor.shape != before.shape:
            raise CannotRecord(
                f"the model changes the shape of its input {name!r} from {list(before.shape)} to {list(tensor.shape)}, "
                "which a replay would not"
            )


def refuse_modes(before: Mapping[str, bool], module: nn.Module) -> None:
    """Raises CannotRecord, naming it, for a submodule that is in another mode than before."""
    for name, child in module.named_modules():
        if before.get(name, child.training) != child.training:
            raise CannotRecord(f"the model sets the mode of its submodule {name!r}, which a replay would not")


def _refuse_cached(
    module: nn.Module, kept: Tensors, example: Tensors, others: Sequence[Tensors], snapshot: Snapshot
) -> None:
    """Raises where the first call keeps a tensor for the later ones that depends on its input.

    `kept` are those that the first call made and the second one left. Afterwards the first call has been made again.
    """
    differs = None
    for inputs in others if kept else ():
        snapshot.put_back()
        with contextlib.suppress(Exception):  # inputs that are unfit for the model tell nothing
            _called(module, inputs)
        found = tensors_in(module)
        differs = next((n for n, t in kept.items() if n in found and not _same_bits(t, found[n])), None)
        if differs is not None:
            break
    if kept:
        snapshot.put_back()
        _called(module, example)
        snapshot.put_back_values()
    if differs is not None:
        raise CannotRecord(f"the model keeps its tensor {differs!r} from its first call, whose input it depends on")


def _leaves(result: Any) -> dict[str, Any]:
    """Outputs by name; tensors as copies, for the model may write into them at the next call."""
    named = named_leaves(result, "" if has_own_names(result) else "output")
    return {n: v.detach().clone() if isinstance(v, torch.Tensor) else v for n, v in named}


def refuse_random(states: RandomStates) -> None:
    """Raises CannotRecord where random numbers of Python or numpy were drawn."""
    drawn = states.changed()
    if drawn is not None:
        raise CannotRecord(f"the model draws from {drawn}, which a replay would not; expected random numbers of torch")


def _refuse_other(found: dict[str, Any], other: dict[str, Any], here: str, there: str) -> None:
    """Raises for outputs that come and go, for tensors of other shapes, and for values that are no tensors and differ.

    Of the same input, tensors must have the same values.
    """
    if list(found) != list(other):
        raise CannotRecord(f"the model returns {sorted(found)} for {here} and {sorted(other)} for {there}")
    for name, value in found.items():
        now = other[name]
        if not isinstance(value, torch.Tensor) or not isinstance(now, torch.Tensor):
            if not _same_value(value, now):
                raise CannotRecord(
                    f"the model's output {name!r} is no tensor and changes: {_short(value)} for {here}, {_short(now)} "
                    f"for {there}; a replay can only change tensors"
                )
        elif (value.shape, value.dtype) != (now.shape, now.dtype):
            raise CannotRecord(
                f"the model's output {name!r} is {value.dtype}{list(value.shape)} for {here} and "
                f"{now.dtype}{list(now.shape)} for {there}"
            )
        elif "same" in there and not _close(value, now):
            raise CannotRecord(f"the model's output {name!r} differs between {here} and {there}")


def refuse_advance(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raises CannotRecord, naming it, for an attribute that is not as it was."""
    for name in {**before, **after}:
        if name not in before or name not in after or before[name] != after[name]:
            raise CannotRecord(
                f"the model changes its attribute {name!r} at each call, which a replay would not do; "
                "keep what changes in a tensor"
            )


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both hold the same bytes; meta tensors and sparse ones hold none that can be compared."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.device.type == "meta" or not is_dense(one) or not is_dense(other):
        return True
    return same_bytes(one, other)


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.device.type == "meta" or not is_dense(one) or not is_dense(other):
        return True  # the recorder refuses them
    if not one.is_floating_point() and not one.is_complex():
        return bool(torch.equal(one, other))
    a, b = (
        torch.nan_to_num(t.detach().to(torch.complex128 if t.is_complex() else torch.float64)) for t in (one, other)
    )
    return bool((a - b).norm() <= _SLACK * b.norm() + 1e-12)


def _same_value(one: Any, other: Any) -> bool:
    """Whether both are the same value, as far as one can see: objects of which one cannot are `Structure.of`'s."""
    if type(one) is not type(other):
        return False
    return repr(one) == repr(other) or " at 0x" in repr(one)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
