"""Host reads that no dispatcher shows: a mode over torch's Python functions, active while a recorder looks on.

A replay would repeat what the host read while it was recorded. So what depends on inputs, on the module's state or on
random numbers must not be read; constants may be. What operators do inside of themselves is done again by each replay.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

from torch.overrides import TorchFunctionMode

from nimble_jobs.engine.private.modes import backward_call
from nimble_jobs.engine.private.tensors import tree_leaves
from nimble_jobs.engine.recorder import Recorder
from nimble_jobs.engine.rewrites import rewritten

# What gives values, or a way to them, to Python, and is no operator.
_READS = {
    "__array__",
    "__deepcopy__",
    "__dlpack__",
    "__format__",
    "__reduce_ex__",
    "__repr__",
    "_typed_storage",
    "apply_",
    "data_ptr",
    "map2_",
    "map_",
    "numpy",
    "storage",
    "tolist",
    "untyped_storage",
}
# What calls an operator that reads, unless a constructor of torch's calls it, which turns the dispatcher off.
_CONVERSIONS = {"__bool__", "__complex__", "__float__", "__index__", "__int__", "item"}
# Operators made of others that read the values of these arguments on the host: by position and by name.
_READ_ARGUMENTS = {
    "tensor_split": ((1, "tensor_indices_or_sections"), (1, "indices_or_sections")),
    "pack_padded_sequence": ((1, "lengths"),),
    "ctc_loss": ((2, "input_lengths"), (3, "target_lengths")),
}
_BUILDERS = {"tensor", "as_tensor", "asarray", "new_tensor", "new"}  # out of nested lists, which may hold tensors
# Hooks on gradients, which run Python in each backward of eager, and in none of a replay's.
_HOOKS = {"register_hook", "register_post_accumulate_grad_hook", "retain_grad"}
_LAYOUT_QUESTIONS = {"as_strided", "as_strided_", "is_contiguous", "is_set_to", "storage_offset", "stride"}


class HostReads(TorchFunctionMode):
    """Raises CannotRecord for a host read of what may be another value at a replay."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = _name(function)
        if name in _READS:
            self._refuse(name, args[:1])
        elif name in _READ_ARGUMENTS:
            for position, keyword in _READ_ARGUMENTS[name]:
                self._refuse(name, args[position] if position < len(args) else kwargs.get(keyword))
        elif name in _BUILDERS:
            nested = (a for a in (*args, *kwargs.values()) if isinstance(a, list | tuple))
            self._refuse(name, [leaf for a in nested for leaf in tree_leaves(a)])
        elif name in _HOOKS:
            self._recorder.refuse(
                f"{name}() at {{source}} has Python called in each backward, which a replay does not do"
            )
        elif name in _LAYOUT_QUESTIONS and self._recorder.varies(args[:1]):
            self._recorder.note_layout_question(name)
        elif name == "data =":
            self._recorder.refuse_moved(*args[:2])
        backward = backward_call(function)
        if backward is not None:
            with self:  # torch turns a mode off while it is asked
                return backward(*args, **kwargs)
        other = rewritten(name, args, kwargs, self._recorder.varies)
        result = function(*args, **kwargs) if other is None else other()
        if name in _CONVERSIONS:
            self._refuse(name, args[:1])
        return result

    def _refuse(self, name: str, read: Any) -> None:
        if self._recorder.varies(read):
            self._recorder.refuse(f"{name}() at {{source}} reads a value of the device on the host")


@contextlib.contextmanager
def watching(recorder: Recorder) -> Iterator[None]:
    """While inside, on this thread, `recorder` sees operators, and host reads that are none are refused.

    Raises CannotRecord at the end as well, where what was called has caught what was raised before.
    """
    with HostReads(recorder), recorder:
        yield
    recorder.raise_again()


def _name(function: Any) -> str:
    """The function's name; an attribute's, where it is read, and with an equals sign where it is set."""
    name: str = getattr(function, "__name__", "")
    if isinstance(function, types.MethodWrapperType) and name in ("__get__", "__set__"):
        attribute = getattr(function.__self__, "__name__", None) or getattr(
            getattr(function.__self__, "fget", None), "__name__", ""
        )
        return f"{attribute} =" if name == "__set__" else str(attribute)
    return name
