"""How a hazard ends: equal to eager over five calls, or refused with a reason, and then equal in eager."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from nimble_jobs import Nimble
from nimble_jobs.errors import NimbleError, UsageError
from tests.hazards.case import CALLS, Case, Data

_INTERNAL = {*vars(nn.Module()), "function"} - {"training"}


@dataclass(frozen=True)
class End:
    """How a case ended. Everything else is an AssertionError."""

    recorded: bool
    reason: str | None = None  # of a refusal


class Refused(Exception):
    """A NimbleError, and whether it came from a call."""


def end_of(case: Case, device: torch.device, **options: Any) -> End:
    """Prepare the case's module and call it five times, beside a module like it in eager.

    Raises AssertionError for what is neither equal nor refused, and whatever else is raised that is no NimbleError.
    """
    options = {"fuse": "off", "streams": 1, "eager": "reference"} | options  # replays, however fast eager is
    try:
        _calls(case, device, fallback=False, **options)
        return End(True)
    except Refused as e:
        reason, misuse = str(e), isinstance(e.__cause__, UsageError)
    if not (misuse and case.misuse) and not case.advanced:
        try:
            _calls(case, device, fallback=True, **options)
        except Refused as e:
            raise AssertionError(f"refused ({reason}), and fallback=True did not help: {e}") from e
    return End(False, reason)


def _calls(case: Case, device: torch.device, *, fallback: bool, **options: Any) -> None:
    seed(0)
    module = _made(case, device)
    seed(0)
    twin = _made(case, device)
    with torch.no_grad():
        before = _state(module, case)
        _same(before, _state(twin, case), "the start")
        nimble = Nimble(module)
        chances = _chances(device)
        try:
            nimble.prepare(case.call(Data(0, device)), fallback=fallback, **options)
        except NimbleError as e:
            _same(_state(module, case), before, "what prepare left behind")
            _same(_chances(device), chances, "the random states that prepare left behind")
            raise Refused(f"{type(e).__name__}: {e}") from e
        _same(_state(module, case), before, "what prepare left behind")
        _same(_chances(device), chances, "the random states that prepare left behind")
        for turn in range(1, CALLS + 1):
            _one_call(case, turn, module, twin, nimble, device)


def _made(case: Case, device: torch.device) -> nn.Module:
    module = case.make().to(device)
    for child in module.modules():
        child.training = False  # exported ones have no `eval`
    return module


def _one_call(case: Case, turn: int, module: nn.Module, twin: nn.Module, nimble: Nimble, device: torch.device) -> None:
    given, expected_given = case.call(Data(turn, device)), case.call(Data(turn, device))
    case.between(module, turn)
    seed(turn)
    try:
        found = nimble(*given[0], **given[1])
    except NimbleError as e:
        raise Refused(f"call {turn}: {type(e).__name__}: {e}") from e
    found, found_chances = _kept(found), _chances(device)
    found_state, found_outside = _state(module, case, after=True), _kept(case.outside(module))
    case.between(twin, turn)
    seed(turn)
    expected = twin(*expected_given[0], **expected_given[1])
    where = f"call {turn}"
    _same(found, _kept(expected), f"{where}: the output", strides=case.strides)
    _same(given, expected_given, f"{where}: what the call left of its arguments")
    _same(found_state, _state(twin, case, after=True), f"{where}: the module's state")
    _same(found_outside, _kept(case.outside(twin)), f"{where}: what lies outside of the module")
    _same(found_chances, _chances(device), f"{where}: the random states")


def _kept(value: Any) -> Any:
    """A copy of outputs that later calls do not change; what cannot be copied stays."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {k: _kept(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_kept(v) for v in value)
    return value


def _state(module: nn.Module, case: Case, *, after: bool = False) -> dict[str, Any]:
    """Tensors, attributes and the number of hooks of each submodule, by name."""
    found: dict[str, Any] = {}
    for prefix, child in module.named_modules():
        attributes = {k: v for k, v in vars(child).items() if k not in _INTERNAL and not k.startswith("_torchdynamo")}
        if after and not case.attributes:
            attributes = {}
        for name, value in (*child._parameters.items(), *child._buffers.items(), *attributes.items()):
            if not isinstance(value, nn.Module):
                found[f"{prefix}.{name}"] = _copied(value)
        found[f"{prefix}.training"] = child.training
        found[f"{prefix}.hooks"] = len(child._forward_hooks), len(child._forward_pre_hooks)
    return found


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return copy.deepcopy(value) if isinstance(value, list | dict | set | tuple | SimpleNamespace) else value


def _chances(device: torch.device) -> dict[str, Any]:
    """The random states of Python, numpy and torch."""
    state = np.random.get_state()
    found = {"python": repr(random.getstate()), "numpy": (state[1].tobytes(), state[2]), "torch": torch.get_rng_state()}
    return found | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def seed(turn: int) -> None:
    """The same random numbers for whoever is called next."""
    random.seed(turn)
    np.random.seed(turn)
    torch.default_generator.manual_seed(turn)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(turn)


def _same(found: Any, expected: Any, where: str, *, strides: bool = True) -> None:
    """Raises AssertionError, naming the place, unless both are of the same types, structure, dtypes and values."""
    if isinstance(expected, torch.Tensor):
        _same_tensor(found, expected, where, strides=strides)
        return
    assert type(found) is type(expected), f"{where}: {found!r} is not {expected!r}"
    found, expected = _opened(found), _opened(expected)
    if isinstance(expected, torch.Tensor):
        _same_tensor(found, expected, where, strides=strides)
    elif isinstance(expected, Mapping):
        assert list(found) == list(expected), f"{where}: keys {list(found)} are not {list(expected)}"
        for key in expected:
            _same(found[key], expected[key], f"{where}.{key}", strides=strides)
    elif isinstance(expected, tuple | list | deque):
        assert len(found) == len(expected), f"{where}: {len(found)} values are not {len(expected)}"
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            _same(a, b, f"{where}.{i}", strides=strides)
    elif isinstance(expected, np.ndarray):
        np.testing.assert_allclose(found, expected, err_msg=where)
    elif isinstance(expected, bool | int | float | str | bytes | complex | set | frozenset | type(None)):
        alike = found == expected or (found != found and expected != expected)  # NaN
        assert alike, f"{where}: {found!r} is not {expected!r}"


def _opened(value: Any) -> Any:
    """What an object holds, where that is what is compared."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, SimpleNamespace):
        return vars(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return value


def _same_tensor(found: Any, expected: torch.Tensor, where: str, *, strides: bool) -> None:
    assert isinstance(found, torch.Tensor), f"{where}: {found!r} is no tensor"
    assert found.dtype is expected.dtype, f"{where}: {found.dtype} is not {expected.dtype}"
    assert found.shape == expected.shape, f"{where}: shape {list(found.shape)} is not {list(expected.shape)}"
    assert found.device == expected.device, f"{where}: on {found.device}, not on {expected.device}"
    assert found.layout is expected.layout, f"{where}: {found.layout} is not {expected.layout}"
    assert found.requires_grad == expected.requires_grad, f"{where}: requires_grad is {found.requires_grad}"
    if expected.layout is not torch.strided or expected.is_meta:
        return
    allowed = [_strides(expected), _strides(torch.empty_like(expected))]  # a copy is dense
    assert not strides or _strides(found) in allowed, f"{where}: strides {found.stride()} are not {expected.stride()}"
    assert found.is_conj() == expected.is_conj(), f"{where}: is_conj is {found.is_conj()}"
    a, b = _plain(found), _plain(expected)
    torch.testing.assert_close(a, b, equal_nan=True, rtol=1e-4, atol=1e-5, msg=lambda m: f"{where}: {m}")


def _strides(tensor: torch.Tensor) -> list[int]:
    """Those that say where an element lies."""
    return [s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1] if tensor.numel() else []


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """In a type that every comparison knows."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_floating_point() and tensor.dtype not in (torch.float32, torch.float64):
        return tensor.float()
    return tensor
