"""Refuses host reads that the dispatcher does not show. It is a mode over torch's Python functions, active while
recording.

A replay would go on with the value that the host read while recording. So the model must not read anything that depends
on inputs, on its state or on random numbers. It may read constants. Reads inside operators are fine, since each replay
runs the operators again.
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

# Functions that are no operators and give Python values, or access to them.
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
# Functions that call a reading operator, except from a constructor of torch, which turns the dispatcher off.
_CONVERSIONS = {"__bool__", "__complex__", "__float__", "__index__", "__int__", "item"}
# Composite operators that read the values of these arguments on the host: position and name.
_READ_ARGUMENTS = {
    "tensor_split": ((1, "tensor_indices_or_sections"), (1, "indices_or_sections")),
    "pack_padded_sequence": ((1, "lengths"),),
    "ctc_loss": ((2, "input_lengths"), (3, "target_lengths")),
}
_BUILDERS = {"tensor", "as_tensor", "asarray", "new_tensor", "new"}  # they take nested lists, which may hold tensors
# Hooks on gradients. Eager runs their Python in each backward; a replay does not.
_HOOKS = {"register_hook", "register_post_accumulate_grad_hook", "retain_grad"}
_LAYOUT_QUESTIONS = {"as_strided", "as_strided_", "is_contiguous", "is_set_to", "storage_offset", "stride"}


class HostReads(TorchFunctionMode):
    """Raises CannotRecord for a host read of a value that may differ in a replay."""

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
                f"{name}() at {{source}} registers Python for each backward pass, which a replay does not call"
            )
        elif name in _LAYOUT_QUESTIONS and self._recorder.varies(args[:1]):
            self._recorder.note_layout_question(name)
        elif name == "data =":
            self._recorder.refuse_moved(*args[:2])
        backward = backward_call(function)
        if backward is not None:
            with self:  # torch turns a mode off while it handles a call
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
    """A context in which `recorder` sees all operators of this thread, and other host reads are refused.

    Raises CannotRecord again at the end if the model has caught it.
    """
    with HostReads(recorder), recorder:
        yield
    recorder.raise_again()


def _name(function: Any) -> str:
    """The function's name; for an attribute, its name, with an equals sign if it is set."""
    name: str = getattr(function, "__name__", "")
    if isinstance(function, types.MethodWrapperType) and name in ("__get__", "__set__"):
        attribute = getattr(function.__self__, "__name__", None) or getattr(
            getattr(function.__self__, "fget", None), "__name__", ""
        )
        return f"{attribute} =" if name == "__set__" else str(attribute)
    return name
