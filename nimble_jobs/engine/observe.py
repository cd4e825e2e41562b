"""Calls a model a few times in eager, before anything is recorded, to see what its calls do.

Refuses models that no replay could repeat: attributes change from call to call; a call draws random numbers of Python
or numpy; an output is not a tensor and depends on the input; or the first call differs from later ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nimble_jobs.engine.attributes import Attributes
from nimble_jobs.engine.contents import Contents, tensors_in
from nimble_jobs.engine.held import Held
from nimble_jobs.engine.memory import is_dense
from nimble_jobs.engine.private.runtime import forget_compiled
from nimble_jobs.engine.random_states import RandomStates
from nimble_jobs.engine.same_bytes import same_bytes
from nimble_jobs.engine.state import Snapshot
from nimble_jobs.engine.tree import has_own_names, named_leaves, opened
from nimble_jobs.errors import CannotRecord

_SLACK = 5e-2  # relative norm; two eager calls on the same input may add up sums in a different order

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What a module's calls change. Knows its state before them, and can restore it."""

    result: Any  # returned by the call with the example
    snapshot: Snapshot
    random: RandomStates
    changing: dict[str, torch.Tensor]  # tensors of the module whose values a call changes

    def put_back(self) -> None:
        """Restore tensors and random states to before the first call. What calls cache for later calls stays."""
        self.snapshot.put_back_values()
        self.random.put_back()


class Watched:
    """Wraps a module and notes whether its calls leave traces. It is called like the module.

    A trace is any change since the wrapper was made: tensors, their values, attributes, modes, random numbers of Python
    and numpy. A module whose calls leave none does not have to be observed first.
    """

    def __init__(self, module: nn.Module, device: torch.device, held: Held | None = None) -> None:
        """`held`: what the module holds, if it is known."""
        self.left_traces = False
        self.module = module
        self._held, self._random = held or Held(module), RandomStates(device)

    def __call__(self, *inputs: torch.Tensor) -> Any:
        try:
            with self._held.snapshot.watching():
                result = self.module(*inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            self.left_traces = True  # the model may fail under the mode only; unknown, so assume traces
            raise
        self.left_traces = self.left_traces or self._differs()
        return result

    @property
    def observed(self) -> Observed:
        """What `observe` would return for a module that leaves no traces, without the outputs."""
        return Observed(result=None, snapshot=self._held.snapshot, random=self._random, changing={})

    def put_back(self) -> None:
        """Restore everything that the module held, and the random states."""
        self._held.snapshot.put_back()
        self._random.put_back()

    def _differs(self) -> bool:
        if self._random.changed() is not None or self._held.snapshot.nests:
            return True
        contents = Contents(self.module)
        return (
            self._held.differing_tensor(contents) is not None
            or self._held.attributes.differing(Attributes(contents)) is not None
        )


def observe(module: nn.Module, example: Tensors, others: Sequence[Tensors], device: torch.device) -> Observed:
    """Call a module with an example and with other inputs like it. Its tensors and the random states are then restored.

    Raises what the module raises for the example, and CannotRecord if no replay could repeat its calls. Other inputs
    for which the module raises are skipped.
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
    kept = Attributes(Contents(module))
    changing = snapshot.changing()
    snapshot.put_back_values()
    states.put_back()
    again = _leaves(_called(module, example))
    refuse_advance(kept, Attributes(Contents(module)))
    _refuse_other(named, again, "its first call", "the next one, on the same input")
    now = tensors_in(module)
    _refuse_cached(module, {n: values[n] for n, t in made.items() if now.get(n) is t}, example, others, snapshot)
    states.put_back()
    for inputs in others:
        try:
            found = _leaves(_called(module, inputs))
        except Exception:  # noqa: BLE001 - this input may not suit the model; the example does
            snapshot.put_back_values()
            continue
        refuse_advance(kept, Attributes(Contents(module)))
        _refuse_other(named, found, "one input", "another")
        changing |= snapshot.changing()
    refuse_random(states)
    return Observed(result=first, snapshot=snapshot, random=states, changing=changing)


def _called(module: Callable[..., Any], inputs: Tensors, snapshot: Snapshot | None = None) -> Any:
    given = [t.clone() for t in inputs.values()]  # the model may write into its inputs
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
                f"the model changes the shape of its input {name!r} from {list(before.shape)} to {list(tensor.shape)}; "
                "a replay would not"
            )


def refuse_modes(before: Mapping[str, bool], module: nn.Module) -> None:
    """Raise CannotRecord if a submodule has switched between training and evaluation mode. Names the submodule."""
    for name, child in module.named_modules():
        if before.get(name, child.training) != child.training:
            raise CannotRecord(f"the model sets the mode of its submodule {name!r}; a replay would not")


def _refuse_cached(
    module: nn.Module, kept: Tensors, example: Tensors, others: Sequence[Tensors], snapshot: Snapshot
) -> None:
    """Raise CannotRecord if the first call caches a tensor for later calls and the tensor depends on its input.

    `kept` are the tensors that the first call made and the second one left alone. The first call is repeated at the
    end.
    """
    differs = None
    for inputs in others if kept else ():
        snapshot.put_back()
        with contextlib.suppress(Exception):  # the input may not suit the model
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
        raise CannotRecord(f"the model's first call caches a tensor {differs!r} that depends on that call's input")


def _leaves(result: Any) -> dict[str, Any]:
    """Outputs by name. Tensors are copied, since the model's next call may write into them."""
    result = opened(result)
    named = named_leaves(result, "" if has_own_names(result) else "output")
    return {n: v.detach().clone() if isinstance(v, torch.Tensor) else v for n, v in named}


def refuse_random(states: RandomStates) -> None:
    """Raise CannotRecord if random numbers of Python or numpy were drawn."""
    drawn = states.changed()
    if drawn is not None:
        raise CannotRecord(f"the model draws from {drawn}; a replay would not. Use torch's random numbers")


def _refuse_other(found: dict[str, Any], other: dict[str, Any], here: str, there: str) -> None:
    """Raise CannotRecord if two calls have different outputs.

    Names, and the shapes and types of tensors, must be equal. So must all values that are not tensors, and for the same
    input the tensors' values.
    """
    if list(found) != list(other):
        raise CannotRecord(f"the model returns {sorted(found)} for {here} and {sorted(other)} for {there}")
    for name, value in found.items():
        now = other[name]
        if not isinstance(value, torch.Tensor) or not isinstance(now, torch.Tensor):
            if not _same_value(value, now):
                raise CannotRecord(
                    f"the model's output {name!r} is not a tensor, but it changes: {_short(value)} for {here}, "
                    f"{_short(now)} for {there}; a replay can only change tensors"
                )
        elif (value.shape, value.dtype) != (now.shape, now.dtype):
            raise CannotRecord(
                f"the model's output {name!r} is {value.dtype}{list(value.shape)} for {here} and "
                f"{now.dtype}{list(now.shape)} for {there}"
            )
        elif "same" in there and not _close(value, now):
            raise CannotRecord(f"the model's output {name!r} differs between {here} and {there}")


def refuse_advance(before: Attributes, after: Attributes) -> None:
    """Raise CannotRecord if an attribute has changed. Names the attribute."""
    name = before.differing(after)
    if name is not None:
        raise CannotRecord(
            f"the model changes its attribute {name!r} in each call; a replay would not. "
            "Keep values that change in a tensor"
        )


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both hold the same bytes. Meta tensors and sparse ones count as equal, since they cannot be compared."""
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
    """Whether both are the same value, as far as this can be seen. `Structure.of` covers opaque objects."""
    if type(one) is not type(other):
        return False
    return repr(one) == repr(other) or " at 0x" in repr(one)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
