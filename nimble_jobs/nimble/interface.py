"""`Nimble`: a module whose calls replay a schedule."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn

from nimble_jobs.engine.record import state_of
from nimble_jobs.errors import DeviceFault, EngineError, OutOfMemory, UsageError
from nimble_jobs.job import Hit
from nimble_jobs.nimble import inference, training_prepare
from nimble_jobs.nimble.guard import Choice, Gate, ModuleChanged
from nimble_jobs.nimble.inference import Eager
from nimble_jobs.nimble.options import check_options, switched_off_in
from nimble_jobs.nimble.order import in_order_of
from nimble_jobs.nimble.signature import Args, Kwargs, Signature, mismatch, named_keywords, read, split
from nimble_jobs.nimble.stored import opened
from nimble_jobs.nimble.surroundings import Unfit, refuse_surroundings
from nimble_jobs.planner.keys.options import BuildOptions
from nimble_jobs.planner.module.modes import own_mode, own_modes
from nimble_jobs.schedule import Schedule
from nimble_jobs.store import Store


class Prepared(Protocol):
    """One signature that can be called."""

    @property
    def signature(self) -> Signature: ...
    @property
    def schedule(self) -> Schedule | None: ...
    @property
    def fallback(self) -> str | None: ...
    @property
    def hit(self) -> Hit: ...
    @property
    def training(self) -> bool: ...
    @property
    def inputs(self) -> dict[str, torch.Tensor]: ...
    @property
    def outputs(self) -> dict[str, torch.Tensor]: ...
    def run(self, tensors: list[torch.Tensor]) -> Any: ...
    def close(self) -> None: ...


class Nimble:
    """A `torch.nn.Module` on the device it should run on, called through schedules.

    Weights that change in place (an optimizer's step, `load_state_dict`) are seen by the next call. A schedule may lay
    weights and buffers of four dimensions out in another memory format, inside of the same tensors; `release` undoes
    that. On a GPU `prepare` also resets torch.compile's caches, so functions of the caller's under
    `torch.compile` are compiled again when they are called next.
    """

    def __init__(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Module):
            raise UsageError(f"module: found {type(module).__name__}; expected a torch.nn.Module")
        self.module = module
        self._gate = _gate_of(module)
        self._falls_back: set[tuple[Signature, bool]] = set()
        self._left: list[Prepared] = []  # schedules of what the module was, which other threads may still replay
        self._named = named_keywords(module)
        self._prepared: dict[tuple[Signature, bool], Prepared] = {}
        self._positional: dict[tuple[Any, ...], Prepared] = {}  # calls of tensors by position, found without a walk
        self._current: Prepared | None = None
        self._strides = [(t, t.stride()) for t in (*module.parameters(), *module.buffers())]

    def prepare(
        self,
        example: Any,
        *,
        training: bool = False,
        streams: Literal["auto"] | int = "auto",
        fuse: Literal["auto", "off", "max"] = "auto",
        in_flight: int = 1,
        store: str | Path | Store | None = None,
        fallback: bool = False,
        guard: Choice = "on",
        eager: Literal["candidate", "reference"] = "candidate",
        kernels: Mapping[str, bool] | None = None,
    ) -> None:
        """Build a schedule for calls like `example`: a tensor, a tuple of arguments, a dict of keyword arguments, or a
        pair of both. Other signatures that were prepared stay.

        Arguments that are no tensors become part of the schedule. Without `training` the module is prepared in
        evaluation mode, whatever mode it is in. With it, calls take part in autograd as the module's own would, with
        gradients for its parameters and for inputs that require grad in `example`; each backward must come before the
        next call. With `store`, a state folder or an open store, a schedule is looked up there and kept there. Up to
        `in_flight` calls, made on different CUDA streams, run at once; more than one only if the module writes
        nothing into its own state.

        Raises UsageError for arguments that do not fit, CannotRecord if the module does what no schedule can hold,
        CheckFailed if no schedule agrees with eager, EngineError, OutOfMemory; the module is then as it was. With
        `fallback`, calls of this signature run in eager instead, and `fallback` says why.

        If the module itself was measured to be faster than every schedule, calls run it, and `schedule.runs` says
        "eager". With `eager="reference"` they replay the fastest schedule nevertheless. `kernels={"attention": False}`
        leaves kernels of our own out of the search, by the names that a spec's `schedule.kernels` has.

        Calls notice a module that is not what it was when it was prepared: other submodules, tensors, hooks or
        plain attributes. They raise EngineError, or run in eager from then on with `fallback`. `guard="off"`
        leaves that out. A call under autocast or a transform of torch.func raises UsageError, or runs in eager
        with `fallback`. Calls of other threads wait while a signature is prepared. `train()` or `eval()` of
        another thread during a prepare, or during a call that runs in eager, may be lost.
        """
        check_options(streams, fuse, in_flight)
        if eager not in ("candidate", "reference"):
            raise UsageError(f"eager: found {eager!r}; expected 'candidate' or 'reference'")
        if guard not in ("on", "off"):
            raise UsageError(f"guard: found {guard!r}; expected 'on' or 'off'")
        if training and in_flight != 1:
            raise UsageError(f"in_flight: found {in_flight}; expected 1 with training=True")
        if training and store is not None:
            raise UsageError("store: not supported with training=True yet")
        self._named = named_keywords(self.module)
        signature, tensors = read(*split(example), self._named)
        device = _device_of(self.module, signature)
        if torch.is_autocast_enabled(device.type):
            raise UsageError("prepare was called under torch.autocast; expected autocast inside the module's forward")
        options = BuildOptions(
            streams=streams,
            fuse=fuse,
            purpose="latency" if in_flight == 1 else "throughput",
            in_flight=in_flight,
            eager=eager,
            without=switched_off_in(kernels),
            layout="given" if self._prepared else "auto",  # schedules that exist read the weights where they lie
        )
        with self._gate.alone():
            self._build(signature, tensors, options, device, training, store, fallback, guard)

    def _build(
        self,
        signature: Signature,
        tensors: list[torch.Tensor],
        options: BuildOptions,
        device: torch.device,
        training: bool,
        store: str | Path | Store | None,
        fallback: bool,
        guard: Choice,
    ) -> None:
        prepared: Prepared
        try:
            if training:
                with own_modes(self.module):
                    prepared = training_prepare.prepare(self.module, signature, tensors, options, device, guard)
            else:
                with opened(store) as found:
                    prepared = inference.prepare(self.module, signature, tensors, options, device, found, guard)
        except (OutOfMemory, DeviceFault):
            raise
        except EngineError as e:
            if not fallback:
                raise
            prepared = Eager(signature=signature, module=self.module, fallback=str(e), training=training)
        self._keep(prepared)
        (self._falls_back.add if fallback else self._falls_back.discard)((signature, training))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's outputs, in its own structure; the tensors are the caller's to keep.

        Raises UsageError, naming the argument, if a call fits no prepared signature, and EngineError, naming the
        change, where the module is not what it was when it was prepared. With `fallback` the latter and calls whose
        tensors share memory that the module writes into run in eager.
        """
        with self._gate:
            prepared, tensors = self._find(args, kwargs)
            try:
                return self._run(prepared, tensors, args, kwargs)
            except (ModuleChanged, Unfit) as e:
                if (prepared.signature, prepared.training) not in self._falls_back:
                    raise
                if isinstance(e, ModuleChanged):
                    return self._run(self._eager_instead(prepared, str(e)), tensors, args, kwargs)
                return self._run(self._eager(prepared, str(e)), tensors, args, kwargs)

    def _run(self, prepared: Prepared, tensors: list[torch.Tensor], args: Args, kwargs: Kwargs) -> Any:
        if not isinstance(prepared, Eager):
            refuse_surroundings(prepared.signature.tensors[0].device, training=prepared.training)
        if not prepared.training and torch.is_grad_enabled():
            for slot, tensor in zip(prepared.signature.tensors, tensors, strict=True):
                if tensor.requires_grad:
                    raise UsageError(f"{slot.name}: requires grad; expected a tensor that does not, or training=True")
        self._current = prepared
        return prepared.call(args, kwargs) if isinstance(prepared, Eager) else prepared.run(tensors)

    def replay(self) -> None:
        """Replay over `inputs` and `outputs` as they are: no copies, no checks."""
        prepared = self._latest()
        replay = getattr(prepared, "replay", None)
        if replay is None:
            why = prepared.fallback or "this signature runs in eager, which is faster here"
            raise UsageError(f"there is nothing to replay: {why}")
        replay()

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """Static inputs by name (`args.0`, `kwargs.mask`) of the signature prepared or called last."""
        return self._latest().inputs

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        """Static outputs by name, overwritten by the next replay; look them up again after each on a CPU."""
        return self._latest().outputs

    @property
    def schedule(self) -> Schedule | None:
        """The schedule of the signature prepared or called last; None if there is none. Its `runs` is "eager" where
        the module itself is called, which was measured to be faster.
        """
        return self._latest().schedule

    @property
    def backward_schedule(self) -> Schedule | None:
        """The schedule of the backward pass, if the signature prepared or called last has one."""
        found: Schedule | None = getattr(self._latest(), "backward_schedule", None)
        return found

    @property
    def fallback(self) -> str | None:
        """Why the signature prepared or called last has no schedule and runs in eager; None if it has one."""
        return self._latest().fallback

    @property
    def hit(self) -> Hit:
        """Whether the schedule of the signature prepared or called last came from the store."""
        return self._latest().hit

    @property
    def signatures(self) -> tuple[Signature, ...]:
        """What was prepared."""
        return tuple(dict.fromkeys(signature for signature, _ in self._prepared))

    def release(self) -> None:
        """Give the memory of all schedules back, and lay the weights out as they were."""
        for prepared in (*self._prepared.values(), *self._left):
            prepared.close()
        self._left.clear()
        self._prepared.clear()
        self._positional.clear()
        self._current = None
        for tensor, stride in self._strides:
            if tensor.stride() != stride and tensor.shape:
                tensor.data = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(
                    tensor.data
                )

    def __enter__(self) -> Nimble:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _keep(self, prepared: Prepared) -> None:
        signature = prepared.signature
        before = self._prepared.pop((signature, prepared.training), None)
        if before is not None:
            before.close()
        self._prepared[signature, prepared.training] = prepared
        if signature.plain:
            key = tuple((s.shape, s.dtype, s.device, torch.strided) for s in signature.tensors)
            self._positional[prepared.training, key] = prepared
        self._current = prepared

    def _eager(self, prepared: Prepared, reason: str) -> Eager:
        return Eager(signature=prepared.signature, module=self.module, fallback=reason, training=prepared.training)

    def _eager_instead(self, prepared: Prepared, reason: str) -> Eager:
        """What runs the module as it is now, in place of a schedule of what it was."""
        eager = self._eager(prepared, reason)
        self._left.append(prepared)
        self._prepared.pop((prepared.signature, prepared.training), None)
        self._keep(eager)
        return eager

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Prepared, list[torch.Tensor]]:
        if not kwargs:
            key = tuple([(t.shape, t.dtype, t.device, t.layout) if type(t) is torch.Tensor else None for t in args])
            quick = self._positional.get((own_mode(self.module), key)) or self._positional.get((False, key))
            if quick is not None:
                return quick, list(args)
        self._latest()
        signature, tensors = read(args, kwargs, self._named)
        prepared = self._prepared.get((signature, own_mode(self.module))) or self._prepared.get((signature, False))
        if prepared is None:
            prepared, tensors = self._in_another_order(args, kwargs) or (None, tensors)
        if prepared is None and (signature, True) in self._prepared:
            raise UsageError("the module is in evaluation mode; this signature was prepared with training=True only")
        if prepared is None:
            raise mismatch(signature, list(dict.fromkeys(s for s, _ in self._prepared)))
        return prepared, tensors

    def _in_another_order(self, args: Args, kwargs: Kwargs) -> tuple[Prepared, list[torch.Tensor]] | None:
        """What fits a call but for the order of keys in its dicts, if that order has no influence."""
        for (expected, training), prepared in self._prepared.items():
            free = isinstance(prepared, Eager) or (isinstance(prepared, inference.Inference) and prepared.any_order)
            if free and (not training or own_mode(self.module)):
                signature, tensors = read(*in_order_of(expected, args, kwargs), self._named)
                if signature == expected:
                    return prepared, tensors
        return None

    def _latest(self) -> Prepared:
        if self._current is None:
            raise UsageError("nothing is prepared; call prepare first")
        return self._current


_gates: weakref.WeakKeyDictionary[nn.Module, Gate] = weakref.WeakKeyDictionary()
_gates_lock = threading.Lock()


def _gate_of(module: nn.Module) -> Gate:
    """The same for all that call one module."""
    with _gates_lock:
        return _gates.setdefault(module, Gate())


def _device_of(module: nn.Module, signature: Signature) -> torch.device:
    """The one device of a module and its tensor arguments. Raises UsageError if there are several, or none."""
    if not signature.tensors:
        raise UsageError("example: holds no tensor; expected one or more")
    own = {t.device: name for name, t in reversed(state_of(module).items())}
    if len(own) > 1:
        raise UsageError(f"the module is on {' and '.join(sorted(map(str, own)))}; expected one device")
    device = next(iter(own), signature.tensors[0].device)
    for slot in signature.tensors:
        if slot.device != device:
            raise UsageError(f"{slot.name}: found on {slot.device}; expected on {device}, like the module")
    return device
