"""Run a model once and record every device task that it launches (ahead-of-time scheduling, Nimble, NeurIPS 2020).

The resulting program is a plain value. The bytes of its constants and its compiled kernels are kept beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from nimble_jobs.engine.contents import state_of
from nimble_jobs.engine.encode import view_of
from nimble_jobs.engine.host_reads import watching
from nimble_jobs.engine.inductor import kernels_to
from nimble_jobs.engine.memory import is_dense
from nimble_jobs.engine.private.modes import as_if_compiled, functions_off
from nimble_jobs.engine.private.modules import saved_names
from nimble_jobs.engine.private.tensors import storage_id, version
from nimble_jobs.engine.recorder import Recorder, Recording
from nimble_jobs.engine.tree import has_own_names, named_leaves, opened
from nimble_jobs.errors import CannotRecord, NimbleError, first_line
from nimble_jobs.schedule import BufferKind

__all__ = [
    "Recording",
    "flatten_outputs",
    "held",
    "module_names",
    "record",
    "record_compiled",
    "recorder_for",
    "refusing",
    "state_of",
]

# torch's own modules that take a slower path, with other layouts, under a mode over functions.
_ASK_FOR_MODES = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
_WARM_UP_CALLS = 2  # the first compiles, the second runs the compiled code


def record(
    call: Callable[..., Any],
    inputs: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    device: torch.device,
    module: nn.Module | None = None,
) -> Recording:
    """Record one call of `call(*inputs.values())`, without gradients.

    With `module`, tasks name the submodule that launched them. Raises CannotRecord, with the operator and its source
    line, for host reads, for shapes that depend on data, for copies between host and device, and for failures that only
    occur during recording. Other errors of the call come through unchanged.

    If recording is refused, it is tried again as if the call were being compiled. Libraries then avoid shortcuts that
    depend on values.
    """
    try:
        return _recorded(call, inputs, state, device, module)
    except CannotRecord as e:
        with as_if_compiled(), contextlib.suppress(CannotRecord):
            return _recorded(call, inputs, state_of(module) if module is not None else state, device, module)
        raise e


def _recorded(
    call: Callable[..., Any],
    inputs: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    device: torch.device,
    module: nn.Module | None,
) -> Recording:
    recorder = recorder_for(inputs, state, device)
    holding = contextlib.nullcontext() if module is None else held(module, state, recorder)
    with (
        torch.no_grad(),
        refusing(lambda: call(*inputs.values())),
        holding,
        module_names(module, recorder),
        watching(recorder),
    ):
        outputs = flatten_outputs(call(*inputs.values()))
        outputs = recorder.own(outputs)
    return recorder.finish(inputs, outputs)


@contextlib.contextmanager
def refusing(again: Callable[[], object]) -> Iterator[None]:
    """A context around recording. A failure becomes CannotRecord if `again`, the same call in eager, succeeds.

    If `again` raises too, its error comes through. So do our own errors, and errors for lack of memory.
    """
    try:
        yield
    except (NimbleError, torch.OutOfMemoryError):
        raise
    except Exception as e:
        again()
        raise CannotRecord(f"the model fails while it is recorded: {first_line(e)}") from e


@contextlib.contextmanager
def held(module: nn.Module, known: Mapping[str, torch.Tensor], recorder: Recorder) -> Iterator[None]:
    """A context around a recorded call. Raises CannotRecord if the call replaces tensors that replays would go on
    using.

    `known` are the module's tensors at the time, by the names of `state_of`. A call may replace an attribute that each
    call sets and none reads, unless it is a buffer that is saved with the module.
    """
    before = state_of(module)
    marks = {name: _mark(tensor) for name, tensor in before.items()}
    yield
    after, memory = state_of(module), recorder.memory()
    saved = _saved(module)
    live = {id(tensor) for tensor in known.values()}
    for name, old in before.items():
        tensor, (shape, version) = after.get(name), marks[name]
        was = known.get(name, old) if name in saved else old
        used = is_dense(was) and storage_id(was) in memory
        if not _same(was, tensor) and (used or name in saved):
            raise CannotRecord(
                f"the model replaces its tensor {name!r}. A replay cannot rebind a tensor; update it in place"
            )
        if tensor is old and shape != _mark(old)[0]:
            raise CannotRecord(f"the model changes the shape of its tensor {name!r}")
        if tensor is old and id(old) not in live and version != _mark(old)[1] and used:
            raise CannotRecord(f"the model writes into its tensor {name!r}, which an earlier call created")


def _saved(module: nn.Module) -> set[str]:
    """Names of the tensors that are saved with a module."""
    found = set()
    for prefix, child in module.named_modules():
        found |= {f"{prefix}.{name}" if prefix else name for name in saved_names(child)}
    return found


def _mark(tensor: torch.Tensor) -> tuple[torch.Size | None, int | None]:
    """Shape and version, as far as it has them."""
    return tensor.shape if is_dense(tensor) else None, None if tensor.is_inference() else version(tensor)


def _same(old: torch.Tensor, new: torch.Tensor | None) -> bool:
    """Whether both are the same elements of the same memory."""
    if old is new or new is None:
        return old is new
    if not is_dense(old) or not is_dense(new):
        return False
    return (storage_id(old), view_of(old, 0)) == (storage_id(new), view_of(new, 0))


def record_compiled(
    call: Callable[..., Any],
    inputs: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    device: torch.device,
) -> Recording:
    """`record` for a module compiled by `inductor.compile_module`. Its kernels become tasks too.

    Raises CannotRecord if the module cannot be compiled as a whole.
    """
    with torch.no_grad():
        for _ in range(_WARM_UP_CALLS):
            call(*inputs.values())
        recorder = recorder_for(inputs, state, device)
        with kernels_to(recorder):
            outputs = flatten_outputs(call(*inputs.values()))
        with recorder:
            outputs = recorder.own(outputs)
    return recorder.finish(inputs, outputs)


def recorder_for(
    inputs: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor], device: torch.device
) -> Recorder:
    """A recorder that knows these tensors by name."""
    recorder = Recorder(device)
    for name, tensor in inputs.items():
        recorder.add_known(tensor, BufferKind.INPUT, name)
    for name, tensor in state.items():
        recorder.add_known(tensor, BufferKind.STATE, name)
    return recorder


def flatten_outputs(result: Any) -> dict[str, torch.Tensor]:
    """Name every tensor that a model returns: `output` for one tensor, else keys and positions joined by dots.

    Raises CannotRecord if there is no tensor, or if two have the same name.
    """
    named: dict[str, torch.Tensor] = {}
    result = opened(result)
    for name, leaf in named_leaves(result, "" if has_own_names(result) else "output"):
        if isinstance(leaf, torch.Tensor):
            if name in named:
                raise CannotRecord(f"the model returned two tensors under the name {name!r}")
            named[name] = leaf
    if not named:
        raise CannotRecord(f"the model returned {type(result).__name__}; expected a tensor, or tensors in a container")
    return named


@contextlib.contextmanager
def module_names(module: nn.Module | None, recorder: Recorder) -> Iterator[None]:
    """A context in which `recorder.path` names the submodules being called."""
    handles = []
    unseen: list[contextlib.AbstractContextManager[Any]] = []
    for name, child in module.named_modules() if module is not None else ():
        if isinstance(child, torch.jit.ScriptModule):
            continue  # it takes no hooks

        def enter(m: nn.Module, _a: Any, name: str = name) -> None:
            recorder.path.append(name)
            if type(m) in _ASK_FOR_MODES:
                unseen.append(functions_off())
                unseen[-1].__enter__()

        def leave(m: nn.Module, _a: Any, _r: Any) -> None:
            recorder.path.pop()
            if type(m) in _ASK_FOR_MODES:
                unseen.pop().__exit__(None, None, None)

        handles += [child.register_forward_pre_hook(enter), child.register_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        while unseen:  # a call was aborted
            unseen.pop().__exit__(None, None, None)
        for handle in handles:
            handle.remove()
