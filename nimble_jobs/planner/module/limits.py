"""Which whole numbers a model can take: token ids below the vocabulary, positions below the length of a table.

An index out of range is an error without a record's name on a CPU, and on CUDA an assertion on the device that ends the
process. So the model is called once with random small numbers, while every operator that looks something up is watched:
where its indexes are the input itself, the size of its table bounds the input. Batches are then checked on the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from nimble_jobs.data import Batch
from nimble_jobs.engine.inputs import Below, draw
from nimble_jobs.engine.private.modes import DispatchMode
from nimble_jobs.errors import CannotRecord, OutOfMemory, first_line
from nimble_jobs.models.packed import Packed, packed_in
from nimble_jobs.models.preprocessed import Preprocessed, inner
from nimble_jobs.packing import Layout
from nimble_jobs.planner.module.modes import eval_mode
from nimble_jobs.planner.module.restoring import restoring_state
from nimble_jobs.preprocess import BITS

_FREE = np.iinfo(np.int64)
_aten = torch.ops.aten
_BY_ROW = (_aten.embedding, _aten._embedding_bag, _aten._embedding_bag_forward_only)
_ALONG = (_aten.index_select, _aten.gather, _aten.scatter, _aten.scatter_)
_COPIES = (_aten.clone, _aten._to_copy)


@dataclass(frozen=True, eq=False)
class Limits:
    """Bounds of each number of a record; those that nothing bounds have the whole range of int64."""

    low: np.ndarray | None = None  # int64 [*record], inclusive; None: nothing is bounded
    high: np.ndarray | None = None  # int64 [*record], exclusive
    unchecked: str | None = None  # why nothing could be found out, if nothing could
    layout: Layout | None = None  # of records with several inputs, whose bounds are in `parts`
    parts: Mapping[str, Limits] = field(default_factory=dict)  # by path

    @property
    def bounded(self) -> bool:
        """Whether `wrong` has anything to look for."""
        return self.low is not None or any(part.bounded for part in self.parts.values())

    def wrong(self, x: np.ndarray) -> dict[int, str]:
        """The rows of `x` [n, *record] that hold a number out of its bounds, each with the reason."""
        if self.layout is not None:
            return self._wrong_parts(self.layout, x)
        if self.low is None or self.high is None or x.dtype.kind not in "iub" or not len(x):
            return {}
        if x.min() >= self.low.max() and x.max() < self.high.min():
            return {}
        outside = (x < self.low) | (x >= self.high)
        rows = np.flatnonzero(outside.reshape(len(x), -1).any(axis=1))
        return {row: self._reason(x[row], outside[row]) for row in rows.tolist()}

    def sift(self, batch: Batch, where: Callable[[int], str]) -> Batch:
        """The batch, its records that are out of bounds among the bad ones; `where` names a record's place."""
        wrong = self.wrong(batch.x)
        return batch.without({row: f"{where(int(batch.indexes[row]))}: {why}" for row, why in wrong.items()})

    def _wrong_parts(self, layout: Layout, rows: np.ndarray) -> dict[int, str]:
        wrong: dict[int, str] = {}
        fields = layout.fields(rows)
        for path, limits in self.parts.items():
            for row, why in limits.wrong(fields[path]).items():
                wrong.setdefault(row, f"{path} {why}")
        return wrong

    def _reason(self, record: np.ndarray, outside: np.ndarray) -> str:
        assert self.low is not None
        assert self.high is not None
        place = tuple(int(axis) for axis in np.argwhere(outside)[0])
        low, high = int(self.low[place]), int(self.high[place])
        at = f" at [{', '.join(map(str, place))}]" if record.size > 1 else ""
        return (
            f"holds {record[place]}{at}; expected {low} to {high - 1}: the model looks it up in a table of {high} rows"
        )


def find_limits(module: nn.Module, shape: Sequence[int], device: torch.device) -> Limits:
    """The bounds of a model's input of whole numbers, `shape` [batch, *record]; the module is left as it was.

    Bounds are not kept with a schedule: they cost one call, where loading a schedule takes nine, and models that run
    in eager need them, too. A model that refuses random numbers has none that are known, and the reason is given.
    Raises OutOfMemory, torch.AcceleratorError.
    """
    if isinstance(module, Packed):
        return _limits_of_parts(module, shape[0], device)
    module = inner(module)  # whose numbers are those of the records, in a wider type
    below = integers_below(module)

    def call() -> _Lookups:
        x = torch.randint(0, below, tuple(shape), device=device)
        lookups = _Lookups({"": x})
        with lookups:
            module(x)
        return lookups

    seen = _seen(module, call, device, f"whole numbers below {below}")
    return seen if isinstance(seen, Limits) else seen.limits("")


def _limits_of_parts(module: Packed, count: int, device: torch.device) -> Limits:
    """The same for a model with several inputs: one call finds the bounds of each that is given whole numbers."""
    layout = module.layout
    whole = [part.path for part in layout.parts if part.gives == "integer" and not part.is_made]
    bounded = layout.bounded(integers_below(module))

    def call() -> _Lookups:
        rows = draw((count, layout.nbytes), torch.uint8, bounded, device=device)
        arguments = module.arguments(rows)
        arguments |= {path: arguments[path].clone() for path in whole}  # no views of the rows
        lookups = _Lookups({path: arguments[path] for path in whole})
        with lookups:
            module.call(arguments)
        return lookups

    seen = _seen(module, call, device, "random records")
    if isinstance(seen, Limits):
        return seen
    return Limits(layout=layout, parts={path: seen.limits(path) for path in whole})


def _seen(module: nn.Module, call: Callable[[], _Lookups], device: torch.device, what: str) -> _Lookups | Limits:
    """What a call looked up, or limits that say why it could not be made. Raises as `find_limits`."""
    try:
        with restoring_state(module, device) as snapshot, eval_mode(module), torch.no_grad(), snapshot.watching():
            return call()
    except (torch.OutOfMemoryError, MemoryError) as e:
        raise OutOfMemory(f"not enough memory on {device} for a call of the model: {e}") from e
    except torch.AcceleratorError:
        raise
    except CannotRecord as e:
        return Limits(unchecked=str(e))
    except Exception as e:  # noqa: BLE001  # the model is the user's: it may raise anything
        return Limits(unchecked=f"the model cannot be called with {what}: {first_line(e)}")


def integers_below(module: nn.Module) -> int:
    """A bound on random integers that no embedding of the module can be overrun by."""
    return min((m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)), default=2)


def numbers_for(module: nn.Module) -> Below:
    """What random input of a module is drawn from: no index is overrun, and records look like those of its job."""
    if (packed := packed_in(module)) is not None:
        return packed.layout.bounded(integers_below(packed))
    if not isinstance(module, Preprocessed):
        return integers_below(module)
    steps = module.preprocess
    return min(integers_below(module), BITS[steps.dtype][1] + 1) if steps.whole else steps.usual


class _Lookups(DispatchMode):
    """Sees operators that pick by index, and keeps the bounds of indexes that are numbers of the input: the input
    itself, views of it, and copies of those in whatever type.
    """

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """`inputs` by name, each with a storage of its own. Their numbers are counted through, input after input."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._first = dict(
            zip(inputs, itertools.accumulate((x.numel() for x in inputs.values()), initial=0), strict=False)
        )
        self._shapes = {name: x.shape for name, x in inputs.items()}
        # By the storage that holds them: whose numbers of the input its elements are, -1 for none.
        self._origins = {
            x.untyped_storage().data_ptr(): torch.arange(self._first[name], self._first[name] + x.numel())
            for name, x in inputs.items()
        }
        self._held = [*inputs.values()]  # so that no other tensor gets a storage that is known
        count = sum(x.numel() for x in inputs.values())
        self._low = torch.full((count,), _FREE.min, dtype=torch.int64)
        self._high = torch.full((count,), _FREE.max, dtype=torch.int64)

    def limits(self, name: str) -> Limits:
        """The bounds of one input's numbers; none if nothing has looked one of them up."""
        first, shape = self._first[name], self._shapes[name]
        low, high = (bounds[first : first + shape.numel()].view(shape) for bounds in (self._low, self._high))
        if bool((low == _FREE.min).all()) and bool((high == _FREE.max).all()):
            return Limits()
        return Limits(low=low.amax(0).numpy(), high=high.amin(0).numpy())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet in _BY_ROW:
            self._see(args[1], 0, args[0].shape[0])
        elif packet in _ALONG and args[0].dim():
            self._see(args[2], 0, args[0].shape[args[1]])
        elif packet is _aten.index:
            self._see_each(args[0], args[1])
        out = func(*args, **(kwargs or {}))
        if packet in _COPIES:
            self._follow(args[0], out)
        return out

    def _see_each(self, table: torch.Tensor, indexes: Sequence[torch.Tensor | None]) -> None:
        for axis, index in enumerate(indexes):
            if index is not None and index.dtype in (torch.bool, torch.uint8):  # a mask covers several axes
                return
            if index is not None:
                self._see(index, -table.shape[axis], table.shape[axis])

    def _see(self, index: torch.Tensor, low: int, high: int) -> None:
        origin = self._origin(index)
        if origin is None:
            return
        numbers = origin.reshape(-1)
        numbers = numbers[numbers >= 0]
        self._low[numbers] = self._low[numbers].clamp(min=low)
        self._high[numbers] = self._high[numbers].clamp(max=high)

    def _follow(self, source: torch.Tensor, copy: torch.Tensor) -> None:
        origin = self._origin(source)
        if origin is None or copy.is_floating_point():
            return
        held = torch.full((copy.untyped_storage().nbytes() // copy.itemsize,), -1, dtype=torch.int64)
        held.as_strided(copy.shape, copy.stride(), copy.storage_offset()).copy_(origin)
        self._origins[copy.untyped_storage().data_ptr()] = held
        self._held.append(copy)

    def _origin(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Which number of the input each element is, in the tensor's shape."""
        if tensor.layout is not torch.strided:
            return None
        held = self._origins.get(tensor.untyped_storage().data_ptr())
        if held is None or tensor.untyped_storage().nbytes() != len(held) * tensor.itemsize:
            return None
        return held.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
