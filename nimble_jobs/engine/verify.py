"""Checks replays against eager execution, on fresh random input and over poisoned outputs."""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

import torch

from nimble_jobs.engine.capture import Instance
from nimble_jobs.engine.device import synchronize
from nimble_jobs.engine.difference import in_double, relative_norm
from nimble_jobs.engine.inputs import Below, is_mask, like, random_inputs
from nimble_jobs.engine.observe import Observed
from nimble_jobs.engine.record import flatten_outputs
from nimble_jobs.errors import CheckFailed, first_line
from nimble_jobs.schedule import Port

__all__ = ["ROUNDS", "TOLERANCE", "check", "check_alike", "poison", "random_inputs", "run_once"]

# Largest accepted relative norm against eager, by the model's dtype. Kernels may only differ in the order of additions.
TOLERANCE = {"fp32": 1e-3, "fp16": 1e-2, "bf16": 5e-2}
ROUNDS = 2
_CALLS = 3  # in a row, if the module changes its own state
_SCALES = ((1.0, 1e-6, 1e4), (1.0, 0.0, -100.0))  # of the input, for each round
_FACTORS = (1.0, 2.0, 0.5)  # of the example's floating values, if the model cannot take random ones
_NOISE = 1e-3  # of an output's usual norm; with scaled input, anything smaller is mere rounding
_STATE = "@"  # precedes the names of the module's own tensors
_NONE: Mapping[str, torch.Tensor] = MappingProxyType({})


def tolerance_for(module: torch.nn.Module, example: torch.Tensor) -> float:
    """The default for the narrowest floating type among a module's parameters and its input."""
    names = {torch.float16: "fp16", torch.bfloat16: "bf16"}
    kinds = {p.dtype for p in module.parameters()} | {example.dtype}
    return max(TOLERANCE[names.get(kind, "fp32")] for kind in kinds)


def poison(instance: Instance) -> None:
    """Overwrite the outputs, so that leftovers cannot pass for a replay's result."""
    for tensor in instance.outputs.values():
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.fill_(float("nan"))
        elif tensor.dtype is torch.bool:
            tensor.logical_not_()
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).max)


def check(
    instance: Instance,
    eager: Callable[..., Any],
    ports: tuple[Port, ...],
    device: torch.device,
    *,
    tolerance: float,
    seed: int,
    below: Below = 2,
    integers: Mapping[str, torch.Tensor] = _NONE,
    observed: Observed | None = None,
    example: Mapping[str, torch.Tensor] = _NONE,
    thorough: bool = False,
    others: Sequence[Instance] = (),
) -> float:
    """Compare replays with eager calls on fresh input. Returns the largest relative norm of any output.

    `others` are further instances of the same program; they are compared with the same eager calls. With `observed`,
    the module changes its own state: eager and replay then each make several calls in a row from the observed state,
    what they leave in the module is compared too, and the state is restored. With `thorough` the input also has other
    scales. If eager cannot take random input, inputs like the `example` are used. Raises CheckFailed, naming the
    output, if a norm is above `tolerance`.
    """
    worst = 0.0
    changing = observed.changing if observed is not None else {}
    put_back = observed.put_back if observed is not None else lambda: None
    calls = _CALLS if changing or thorough else 1
    norms: dict[str, float] = {}
    for turn in range(ROUNDS):
        scales = _SCALES[turn] if thorough else (1.0,) * calls
        drawn = [
            random_inputs(ports, device, seed + turn + i * ROUNDS, below, integers, turn=turn + i * ROUNDS, scale=scale)
            for i, scale in enumerate(scales)
        ]
        put_back()
        try:
            sequence, wanted = _expected(eager, drawn, example, changing, put_back)
            first: dict[str, torch.Tensor] = {}  # what the first instance gave, until it is called again
            for replayed, i in itertools.product((instance, *others), range(len(sequence))):
                if i == 0:
                    put_back()
                inputs, expected = sequence[i], wanted[i]
                found = _found(replayed, inputs, changing)
                synchronize(device)
                if found.keys() != expected.keys():
                    raise CheckFailed(f"the replay has the outputs {sorted(found)}, eager has {sorted(expected)}")
                if first and all(torch.equal(found[name], tensor) for name, tensor in first.items()):
                    continue  # as near to eager as the first instance, for less work
                if len(sequence) == 1 and not changing:
                    first = first or found
                for name, tensor in expected.items():
                    if thorough and scales[i] == 1.0:
                        norms[name] = max(norms.get(name, 0.0), _norm(tensor))
                    error = relative_norm(found[name], tensor)
                    if error > tolerance and scales[i] != 1.0:
                        error = _norm(_difference(found[name], tensor)) / max(_NOISE * norms.get(name, 0.0), 1e-30)
                    if not error <= tolerance:
                        _fail(name, i, error, tolerance)
                    worst = max(worst, error) if scales[i] == 1.0 else worst
        finally:
            put_back()
    return worst


def check_alike(
    first: Instance,
    other: Instance,
    *,
    ports: tuple[Port, ...],
    device: torch.device,
    tolerance: float,
    below: Below = 2,
) -> None:
    """Compare replays of another instance of a program with those of one that agrees with eager, on fresh input.

    For programs that change nothing of the module. Raises CheckFailed, naming the output, if a relative norm is above
    `tolerance`.
    """
    for turn in range(ROUNDS):
        inputs = random_inputs(ports, device, secrets.randbits(32), below, turn=turn)
        expected = {name: tensor.clone() for name, tensor in run_once(first, inputs).items()}
        found = run_once(other, inputs)
        synchronize(device)
        for name, tensor in expected.items():
            error = 0.0 if torch.equal(found[name], tensor) else relative_norm(found[name], tensor)
            if not error <= tolerance:
                raise CheckFailed(
                    f"output {name!r} of a further instance differs from the first one's by a relative norm of "
                    f"{error:.3g}; the tolerance is {tolerance:.3g}"
                )


def _fail(name: str, call: int, error: float, tolerance: float) -> NoReturn:
    what = f"tensor {name.removeprefix(_STATE)!r} of the module" if name.startswith(_STATE) else f"output {name!r}"
    after = f" at call {call + 1} from the same state" if call else ""
    raise CheckFailed(
        f"{what} differs from eager by a relative norm of {error:.3g}{after}; the tolerance is {tolerance:.3g}",
        error=error if math.isfinite(error) else None,
    )


def _expected(
    eager: Callable[..., Any],
    drawn: list[dict[str, torch.Tensor]],
    example: Mapping[str, torch.Tensor],
    changing: Mapping[str, torch.Tensor],
    put_back: Callable[[], None],
) -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
    """Inputs that eager can take, with its outputs: random inputs, or else some like the example.

    A random mask may hide everything. If eager's outputs are then NaN or infinite, the example's masks are used
    instead, provided they help. Raises CheckFailed if eager can take none of these inputs.
    """
    ways = [drawn]
    masks = {n: t for n, t in example.items() if is_mask(t)}
    if masks:
        ways.append([{**one, **{n: t.to(one[n].device) for n, t in masks.items()}} for one in drawn])
    if example:
        ways.append(
            [{n: t.to(drawn[0][n].device) for n, t in like(example, f).items()} for f in _FACTORS[: len(drawn)]]
        )
    first: tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]] | None = None
    for way in ways:
        try:
            made = [_eager(eager, inputs, changing) for inputs in way]
            if not masks or all(bool(torch.isfinite(t).all()) for one in made for t in one.values()):
                return way, made
            first = first or (way, made)
            put_back()
        except torch.OutOfMemoryError:
            raise
        except Exception as e:
            put_back()
            if way is ways[-1] and first is None:
                raise CheckFailed(f"the model fails in eager on the check's input: {first_line(e)}") from e
    assert first is not None  # otherwise the last attempt has returned or raised
    return first


def _eager(
    eager: Callable[..., Any], inputs: Mapping[str, torch.Tensor], changing: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The outputs, and the module's tensors that the call changes."""
    with torch.no_grad():  # the model may write into its inputs
        result = eager(*(t.clone() for t in inputs.values()))
        named = {**flatten_outputs(result), **{_STATE + n: t for n, t in changing.items()}}
        return {n: t.clone() for n, t in named.items()}


def _found(
    instance: Instance, inputs: Mapping[str, torch.Tensor], changing: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    return {**run_once(instance, inputs), **{_STATE + n: t for n, t in changing.items()}}


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.nan_to_num(in_double(tensor)).norm())


def _difference(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The difference to measure: infinite if shapes differ, and huge if only one is NaN.

    Values of which only one has overflowed are not compared.
    """
    if one.shape != other.shape:
        return torch.full((1,), float("inf"), dtype=torch.float64)
    a, b = in_double(one), in_double(other)
    both = torch.isfinite(a) & torch.isfinite(b)
    same = torch.isnan(a) == torch.isnan(b)
    elsewhere = torch.zeros_like(a).masked_fill(~same, 1e300)
    return torch.where(both, a - b, elsewhere)


def run_once(instance: Instance, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy inputs in, poison the outputs and replay. Returns the instance's own output tensors."""
    for name, tensor in inputs.items():
        instance.inputs[name].copy_(tensor)
    poison(instance)
    instance.replay()
    return instance.outputs
