"""Every private PyTorch name that the engine uses, in one place, with the versions it was tested with."""

from __future__ import annotations

import contextlib
import gc
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

TESTED = ("2.11",)

_COMPILING = "_is_compiling_flag"  # of torch.compiler

# Batch normalisation in training mode advances its running statistics, which its schemas do not declare:
# position and name of the arguments written, and of the flag that makes it so.
_BATCH_NORM = (((3, "running_mean"), (4, "running_var")), (5, "training"))
_UNDECLARED_WRITES = {
    "aten.native_batch_norm.default": _BATCH_NORM,
    "aten.cudnn_batch_norm.default": _BATCH_NORM,
    "aten.miopen_batch_norm.default": _BATCH_NORM,
}

__all__ = [
    "DispatchMode",
    "TorchDispatchMode",
    "as_if_compiled",
    "backward_call",
    "backward_hooks",
    "below_autograd",
    "clear_workspaces",
    "conv_backend",
    "cuda_driver",
    "deterministic",
    "dict_behind",
    "draws_random",
    "forget_compiled",
    "functions_off",
    "global_hooks",
    "gradient_hooks",
    "has_kernel",
    "in_transform",
    "launch_kernel",
    "modes_off",
    "random_state",
    "returns_seeds",
    "returns_unused_seeds",
    "saved_tensor_hooks",
    "storage_id",
    "tensor_id",
    "tested_version",
    "tree_children",
    "tree_flatten",
    "tree_leaves",
    "tree_unflatten",
    "unscale_",
    "update_scale_",
    "wants_grad_mode",
    "write_arguments",
    "write_only_arguments",
]


class DispatchMode(TorchDispatchMode):
    """A mode that sees operators, and keeps the compiler off its own code without importing it.

    torch has its compiler skip what a mode does, and imports all of it to say so, which takes seconds. While nothing
    has imported it, nothing can compile the mode.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        raw = cls.__dict__.get("__torch_dispatch__")
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        if raw is None:
            return
        skipped: Any = cls.__torch_dispatch__

        def dispatch(*args: Any, **kwargs: Any) -> Any:
            return (skipped if "torch._dynamo" in sys.modules else raw)(*args, **kwargs)

        frames: Any = torch._C._dynamo.eval_frame
        strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
        frames.set_code_exec_strategy(dispatch.__code__, strategy)
        cls.__torch_dispatch__ = dispatch  # type: ignore[method-assign]


def tested_version() -> str | None:
    """None where this torch was tested, else a sentence for the user."""
    if torch.__version__.startswith(TESTED):
        return None
    return f"torch {torch.__version__} was not tested with this version; tested: {', '.join(TESTED)}"


def storage_id(tensor: torch.Tensor) -> int:
    """Identity of the storage behind a tensor, valid while any tensor over it lives."""
    return int(tensor.untyped_storage()._cdata)


def tensor_id(tensor: torch.Tensor) -> int:
    """Identity of what a tensor's Python object stands for, valid while it stands for it."""
    return int(tensor._cdata)


def global_hooks(*, backward: bool) -> dict[str, dict[int, Any]]:
    """The hooks that every module calls, by name; those of the backward pass where asked for."""
    names = ["_global_forward_pre_hooks", "_global_forward_hooks"]
    if backward:
        names += ["_global_backward_pre_hooks", "_global_backward_hooks"]
    return {f"torch.nn.modules.module.{name}": getattr(torch.nn.modules.module, name) for name in names}


def dict_behind(value: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """The dict itself, for what a class shows of its own."""
    if not isinstance(value, MappingProxyType):
        return value
    behind: dict[str, Any] = gc.get_referents(value)[0]
    return behind


def tree_leaves(value: Any) -> list[Any]:
    """Leaves of nested lists, tuples, dicts and registered classes, in order."""
    return _pytree.tree_leaves(value)


def tree_flatten(value: Any) -> tuple[list[Any], Any]:
    """The leaves of a nested value, and a hashable description of the nesting."""
    return _pytree.tree_flatten(value, is_leaf=_is_size)


def _is_size(value: Any) -> bool:
    """A shape is a value, and no tuple that would be made anew."""
    return isinstance(value, torch.Size)


def tree_unflatten(leaves: list[Any], nesting: Any) -> Any:
    """Inverse of `tree_flatten`."""
    return _pytree.tree_unflatten(leaves, nesting)


def tree_children(value: Any) -> list[Any] | None:
    """What a container holds, one level down, in `tree_flatten`'s order; None for a leaf."""
    children, nesting = _pytree.tree_flatten(value, is_leaf=lambda v: v is not value or _is_size(v))
    return None if nesting.is_leaf() else children


def write_arguments(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[int, str], ...]:
    """(position, name) of each argument that this call of the operator writes."""
    declared = tuple(
        (i, a.name) for i, a in enumerate(op._schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    )
    if declared or str(op) not in _UNDECLARED_WRITES:
        return declared
    written, (position, flag) = _UNDECLARED_WRITES[str(op)]
    return written if (args[position] if position < len(args) else kwargs.get(flag)) else ()


def draws_random(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call of the operator draws from a generator. Attention and cuDNN's recurrent layers do only where
    their dropout is not zero, the latter only in training; attention's backward never does: it is given the forward's
    seeds.
    """
    if torch.Tag.nondeterministic_seeded not in op.tags or "_attention_backward" in str(op):
        return False
    given = {a.name: a.default_value for a in op._schema.arguments} | kwargs
    given |= {a.name: value for a, value in zip(op._schema.arguments, args, strict=False)}
    if "dropout_p" in given:
        return bool(given["dropout_p"])
    if str(op) == "aten._cudnn_rnn.default":
        return bool(given["dropout"] and given["train"])
    return True


def random_state(device: torch.device) -> bytes:
    """The state of a device's default generator."""
    with modes_off():
        state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.default_generator.get_state()
        return bytes(state.numpy().tobytes())


def returns_unused_seeds(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether what the call returns on the host is only the seed of a dropout that did not happen: attention's."""
    return "_attention" in str(op) and not draws_random(op, args, kwargs)


def returns_seeds(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the call returns the seeds of a dropout, for its backward to draw the same mask: attention's.

    They lie on the host while nothing is captured, and on the device inside of a capture.
    """
    return "_attention" in str(op) and draws_random(op, args, kwargs)


def write_only_arguments(op: torch._ops.OpOverload) -> tuple[str, ...]:
    """Names of the `out=` arguments, which are filled and not read."""
    return tuple(a.name for a in op._schema.arguments if a.is_out)


def has_kernel(op: torch._ops.OpOverload, device: str) -> bool:
    """Whether the operator was written for this type of device, and is not made of others."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), device.upper()))


_CYCLES_PER_US = 2000  # no GPU's clock is much faster


def clear_workspaces() -> None:
    """Let go of the memory that matrix products keep for every stream they ever ran on."""
    torch._C._cuda_clearCublasWorkspaces()


def keep_busy(micros: float, device: torch.device) -> None:
    """Have the current stream of a GPU spin for at least about so long."""
    with torch.cuda.device(device):
        torch.cuda._sleep(int(micros * _CYCLES_PER_US))


def conv_backend(*args: Any) -> str:
    """The library that `aten.convolution` takes for these arguments."""
    return str(torch._C._select_conv_backend(*args).name)


def launch_kernel(
    function: int,
    grid: tuple[int, int, int],
    warps: int,
    shared_bytes: int,
    arg_types: str,
    args: tuple[Any, ...],
    stream: int,
) -> None:
    """Launch a function of the CUDA driver on a stream, with tensors as pointers."""
    launcher: Any = torch._C._StaticCudaLauncher  # missing from builds without CUDA
    launcher._launch_kernel(function, *grid, warps, shared_bytes, arg_types, args, stream)


def forget_compiled() -> None:
    """Let go of everything that was compiled in this process, for anybody: it is compiled again when it is called."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what this imports: all of Inductor, the first time
        torch._dynamo.reset()


def modes_off() -> AbstractContextManager[Any]:
    """While inside, no dispatch mode sees what is called."""
    manager: AbstractContextManager[Any] = _disable_current_modes()
    return manager


def functions_off() -> AbstractContextManager[Any]:
    """While inside, no mode over torch's Python functions sees what is called."""
    manager: AbstractContextManager[Any] = torch._C.DisableTorchFunction()
    return manager


def backward_call(function: Any) -> Any:
    """What does the same as a function that runs a backward, and is seen by no mode itself, so that modes stay on for
    the Python in that backward; None for other functions.
    """
    if function not in (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward):
        return None

    def call(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(torch.autograd, "has_torch_function", return_value=False):
            if function is torch.Tensor.backward:
                return of_tensor(*args, **kwargs)
            return function(*args, **kwargs)

    def of_tensor(
        tensor: torch.Tensor, gradient: Any = None, retain: Any = None, create: bool = False, **kwargs: Any
    ) -> None:
        retain, create = kwargs.pop("retain_graph", retain), kwargs.pop("create_graph", create)
        torch.autograd.backward(tensor, gradient, retain, create, **kwargs)

    return call


def gradient_hooks(tensor: torch.Tensor) -> list[dict[int, Any]]:
    """The tables of hooks that autograd runs when a leaf's gradient arrives, and once it is added up."""
    tables = (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
    return [table for table in tables if table is not None]


def backward_hooks(module: torch.nn.Module) -> bool:
    """Whether a module, or every module, has hooks on its backward pass."""
    own = module._backward_hooks or module._backward_pre_hooks
    everywhere = torch.nn.modules.module
    return bool(own or everywhere._global_backward_hooks or everywhere._global_backward_pre_hooks)


def saved_tensor_hooks() -> bool:
    """Whether the tensors that autograd saves now go through hooks of the caller's."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def in_transform() -> str | None:
    """The transform of torch.func, or the forward-mode derivative, that is at work around this call; else None."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func"
    return "forward-mode differentiation" if torch.autograd.forward_ad._current_level >= 0 else None


# Operators that leave out what their backward needs unless gradients are on.
_WANT_GRAD_MODE = {"aten.mkldnn_rnn_layer.default"}


def wants_grad_mode(name: str) -> bool:
    """Whether an operator returns less without gradients."""
    return name in _WANT_GRAD_MODE


def below_autograd() -> AbstractContextManager[Any]:
    """While inside, operators are not differentiated, whatever the grad mode."""
    manager: AbstractContextManager[Any] = torch._C._AutoDispatchBelowAutograd()
    return manager


@contextlib.contextmanager
def as_if_compiled() -> Iterator[None]:
    """While inside, `torch.compiler.is_compiling` says so, as far as this torch lets us: libraries then leave out the
    short cuts that depend on values. Other threads are told the same.
    """
    if not hasattr(torch.compiler, _COMPILING):
        yield
        return
    before = getattr(torch.compiler, _COMPILING)
    setattr(torch.compiler, _COMPILING, True)
    try:
        yield
    finally:
        setattr(torch.compiler, _COMPILING, before)


def unscale_(gradients: list[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Multiply gradients by `inverse_scale` in place; `found_inf` becomes 1 where one of them is not finite."""
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse_scale)


def update_scale_(
    scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    found_inf: torch.Tensor,
    *,
    growth: float,
    backoff: float,
    interval: int,
) -> None:
    """Shrink the scale of the loss after a step that was skipped, let it grow after `interval` steps that were not."""
    torch._amp_update_scale_(scale, growth_tracker, found_inf, growth, backoff, interval)


def cuda_driver() -> str:
    """The newest CUDA version that the installed driver supports, as in 13000."""
    return str(torch._C._cuda_getDriverVersion())  # type: ignore[attr-defined]  # missing from its stubs


def deterministic(mode: bool, *, warn_only: bool) -> None:
    """`torch.use_deterministic_algorithms`, which also loads Inductor and has it choose kernels without measuring."""
    torch._C._set_deterministic_algorithms(mode, warn_only=warn_only)
