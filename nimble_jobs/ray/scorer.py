"""`NimbleScorer`: a model as a class for Ray Data's `map_batches`, called through schedules of the state folder."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from nimble_jobs.engine.device import able
from nimble_jobs.engine.tree import named_leaves, opened
from nimble_jobs.errors import UsageError
from nimble_jobs.job import Hit
from nimble_jobs.nimble import Nimble
from nimble_jobs.ray.lot import Lot
from nimble_jobs.spec.units import BadValue, parse_device
from nimble_jobs.store import open_store
from nimble_jobs.store.home import resolve

log = logging.getLogger(__name__)

_SHAPES = 64  # at most; each has a schedule of its own on the device
_LONE = "output"


class NimbleScorer:
    """Scores batches of a `ray.data.Dataset`: each actor looks its schedule up in the state folder, or builds it there.

        dataset.map_batches(
            NimbleScorer,
            fn_constructor_kwargs={"model": load_model, "inputs": "image", "batch_size": 64},
            batch_size=64,
            concurrency=4,
            num_gpus=1,
        )

    A batch is a dict of numpy arrays with one row a record. What is returned has the columns of the batch but for the
    inputs, and one for each tensor that the model returns: `output` if it is a single one, else its name, such as
    `logits` or `boxes.0`. Its rows are the records, its dtype is the model's; bfloat16, which numpy lacks, becomes
    float32.

    The model runs in evaluation mode and without gradients. Its schedule is for `batch_size` records: a smaller batch
    is filled up with copies of its last record, whose results are dropped, and a larger one is cut. If no schedule
    agrees with the model, it runs in eager, and the actor's log says why.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        *,
        inputs: str | Sequence[str] | Mapping[str, str],
        batch_size: int,
        device: str = "auto",
        home: str | Path | None = None,
        keep: str | Sequence[str] | None = None,
    ) -> None:
        """`model`: a module, or better a function that makes it, since Ray then need not send the weights around.

        `inputs`: the column that is the model's argument; several, by position; or a dict from keyword arguments to
        columns. Numbers with a fraction are cast to the dtype of the model's weights, all others stay as they are.
        `batch_size`: records in a call of the model, best as in `map_batches`. `device`: auto is the GPU that Ray gave
        to the actor, or else the CPU. `home`: state folder on the node; None: as the commands choose it. `keep`: the
        column or columns to pass on; None: all but the inputs.

        Raises UsageError for values that cannot be used, or if there is no such device; StoreError.
        """
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise UsageError(f"batch_size: found {batch_size!r}; expected a number of records, at least 1")
        self._columns = _columns(inputs)
        self._batch_size = batch_size
        self._keep = _kept(keep)
        self._home = resolve(None if home is None else str(home))
        self.device = _device(device)
        made = _made(model)
        self._nimble = Nimble(made.to(self.device).eval())
        self._float = next((p.dtype for p in made.parameters() if p.is_floating_point()), torch.float32)
        self._lots: dict[tuple[Any, ...], Lot] = {}

    def __call__(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The batch with the model's outputs. A new shape that is not stored takes the seconds of a build.

        Raises UsageError for a batch that is no dict, for a column that is missing, that has no numbers or whose
        records have different shapes, and for outputs that are not one row a record; OutOfMemory, StoreError.
        """
        if not isinstance(batch, Mapping):
            raise UsageError(f"batch: found {type(batch).__name__}; expected a dict of columns, batch_format='numpy'")
        arrays = {column: _checked(batch, column) for _name, column in self._columns}
        records = len(next(iter(arrays.values())))
        kept = [name for name in batch if name not in arrays] if self._keep is None else self._keep
        passed = {name: _present(batch, name) for name in kept}
        starts = range(0, records, self._batch_size) if records else [0]
        parts = [self._scored({name: a[i : i + self._batch_size] for name, a in arrays.items()}) for i in starts]
        made = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        both = [name for name in made if name in passed]
        if both:
            raise UsageError(f"keep: found {both[0]!r}, which is also an output of the model; expected other columns")
        return {**passed, **made}

    def _scored(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs for at most `batch_size` records."""
        key = tuple((array.shape[1:], array.dtype.str) for array in arrays.values())
        lot = self._lots.get(key)
        if lot is None:
            lot = self._prepared(key, arrays)
        records = lot.fill(arrays)
        result = opened(self._call(lot))
        outputs: dict[str, np.ndarray] = {}
        for name, leaf in named_leaves(result, "" if not isinstance(result, torch.Tensor) else _LONE):
            if not isinstance(leaf, torch.Tensor):
                continue
            if leaf.ndim == 0 or len(leaf) != self._batch_size:
                raise UsageError(
                    f"the model's output {name!r} has the shape {list(leaf.shape)}; expected one row a record, "
                    f"{self._batch_size} in all"
                )
            outputs[name] = _numpy(leaf[:records])
        if not outputs:
            raise UsageError(f"the model returned a {type(result).__name__} without tensors; expected one or more")
        return outputs

    def _prepared(self, key: tuple[Any, ...], arrays: Mapping[str, np.ndarray]) -> Lot:
        """Buffers for batches of this shape, whose schedule is looked up or built."""
        if len(self._lots) >= _SHAPES:
            raise UsageError(f"found more than {_SHAPES} shapes of records; expected few, such as padded lengths")
        lot = Lot(arrays, self._batch_size, self.device, self._float)
        lot.fill(arrays)
        began = time.monotonic()
        with open_store(self._home) as store:
            self._nimble.prepare(self._arguments(lot), store=store, fallback=True)
        self._lots[key] = lot
        log.warning("NimbleScorer on %s: %s, %.1f s", self.device, self._how(), time.monotonic() - began)
        return lot

    @property
    def fallback(self) -> str | None:
        """Why the shape that was scored last has no schedule and runs in eager; None if it has one."""
        return self._nimble.fallback

    def _how(self) -> str:
        if self._nimble.fallback is not None:
            return f"in eager: {self._nimble.fallback}"
        schedule = self._nimble.schedule
        found = "stored schedule" if self._nimble.hit is not Hit.MISS else "schedule built and stored"
        return f"{found}, by which eager is faster" if schedule and schedule.runs == "eager" else found

    def _arguments(self, lot: Lot) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        positional = tuple(lot.tensors[column] for name, column in self._columns if name is None)
        return positional, {name: lot.tensors[column] for name, column in self._columns if name is not None}

    def _call(self, lot: Lot) -> Any:
        args, kwargs = self._arguments(lot)
        with torch.no_grad():
            return self._nimble(*args, **kwargs)


def _columns(inputs: object) -> tuple[tuple[str | None, str], ...]:
    """Keyword, or None for a positional argument, and column of each argument. Raises UsageError."""
    pairs: list[tuple[Any, Any]]
    if isinstance(inputs, str):
        pairs = [(None, inputs)]
    elif isinstance(inputs, Mapping):
        pairs = list(inputs.items())
    elif isinstance(inputs, Sequence):
        pairs = [(None, column) for column in inputs]
    else:
        pairs = []
    named = all(isinstance(column, str) and isinstance(name, str | None) for name, column in pairs)
    if not pairs or not named:
        raise UsageError(f"inputs: found {inputs!r}; expected a column, a list of columns, or arguments with columns")
    return tuple(pairs)


def _kept(keep: object) -> tuple[str, ...] | None:
    """The columns to pass on; None: all but the inputs. Raises UsageError."""
    if keep is None:
        return None
    names = (keep,) if isinstance(keep, str) else tuple(keep) if isinstance(keep, Iterable) else (keep,)
    if not all(isinstance(name, str) for name in names):
        raise UsageError(f"keep: found {_told(keep)}; expected a column or a list of columns")
    return names


def _made(model: object) -> nn.Module:
    """Raises UsageError."""
    if isinstance(model, nn.Module):
        return model
    if not callable(model):
        raise UsageError(f"model: found {_told(model)}; expected a torch.nn.Module, or a function that makes one")
    made = model()
    if not isinstance(made, nn.Module):
        raise UsageError(f"model: made a {type(made).__name__}; expected a torch.nn.Module")
    return made


def _told(value: object) -> str:
    """A wrong value for a message: itself if it is short by its nature, else its type."""
    return repr(value) if isinstance(value, bool | int | float) else type(value).__name__


def _device(text: str) -> torch.device:
    """Raises UsageError."""
    there = torch.cuda.is_available()
    if text == "auto":
        return torch.device("cuda:0" if there else "cpu")
    try:
        device = torch.device(parse_device(str(text)))
    except BadValue as error:
        raise UsageError(f"device: found {text!r}; expected auto, cpu or cuda") from error
    if able(device).separate_memory and not there:
        raise UsageError("device: found cuda, but this actor sees no GPU; expected num_gpus=1 in map_batches")
    return torch.device("cuda:0") if device == torch.device("cuda") else device


def _present(batch: Mapping[str, np.ndarray], column: str) -> np.ndarray:
    if column not in batch:
        raise UsageError(f"column {column!r}: not in the batch; expected one of {', '.join(map(repr, batch))}")
    return batch[column]


def _checked(batch: Mapping[str, np.ndarray], column: str) -> np.ndarray:
    """Raises UsageError for a column that is no array of numbers."""
    array = _present(batch, column)
    if not isinstance(array, np.ndarray):
        raise UsageError(f"column {column!r}: found {type(array).__name__}; expected batch_format='numpy'")
    if array.ndim == 0 or array.dtype.kind not in "biuf":
        raise UsageError(
            f"column {column!r}: found values of dtype {array.dtype}; expected numbers, in records of one shape"
        )
    return array


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    """A copy: in eager an output may be a view of an input, whose memory the next records take."""
    dtype = torch.float32 if tensor.dtype is torch.bfloat16 else tensor.dtype
    return tensor.to("cpu", dtype, copy=True).numpy()
