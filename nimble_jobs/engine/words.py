"""Detects quickly that nothing has been written: gathers words of memory and compares them with their earlier values.

To ask 500 tensors for their addresses takes 20 us, and to compare the attributes of 500 modules takes far longer. But
CPython numbers every change of a dict, and a tensor keeps its place and layout in words of its own. To compare a few
thousand words takes microseconds, and if all are equal, nothing was written. A different word proves nothing: the
caller then has to compare the objects themselves.

The positions of these words are not assumed but found by looking at samples. If that fails, `layout` is None.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nimble_jobs.engine.private.tensors import dict_behind, storage_id, tensor_id

_WORD = 8
_MOST_DIMS = 5  # torch stores the sizes of tensors with more dimensions elsewhere
_SIZES, _STRIDES, _OFFSET = (11, 13, 17, 19, 23), (29, 31, 37, 41, 43), 53


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Positions of words, counted from the start of an object."""

    dict_version: int
    wrapper_impl: int  # in a tensor's Python object: the address of its implementation
    storage: int  # in the implementation: the address of its storage
    autograd: int  # in the implementation: the address of autograd's record; 0 until it is needed
    dims: int  # in the implementation: the number of dimensions
    sizes: int
    strides: int
    rest: tuple[int, ...]  # in the implementation: offset, type, device, keys
    data: int  # in the storage: the address of the bytes
    requires_grad: int  # in autograd's record


class Words:
    """Words that stay equal as long as the added objects do not change. The objects must be kept alive."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        # An address read from memory is followed only if the words that led to it are unchanged.
        self._addresses: tuple[list[int], list[int], list[int]] = ([], [], [])
        self._levels: list[tuple[np.ndarray, bytes]] = []

    def add_dict(self, value: Mapping[Any, Any]) -> None:
        """Watch for keys or values that are set in, or removed from, a dict or a class's attributes."""
        self._addresses[0].append(id(dict_behind(value)) + _WORD * self._layout.dict_version)

    def add_list(self, value: list[Any]) -> None:
        """Watch for elements that are replaced, added or removed."""
        header = id(value) + 2 * _WORD
        self._addresses[0].extend((header, header + _WORD))
        (items,) = _read(header + _WORD, 1)
        self._addresses[1].extend(items + _WORD * i for i in range(len(value)))

    def add_class_of(self, value: object) -> None:
        """Watch for a change of the object's class."""
        self._addresses[0].append(id(value) + _WORD)

    def add_tensor(self, value: torch.Tensor, *, training: bool) -> bool:
        """Watch a tensor's place and layout, with `training` also `requires_grad`. False if that is not possible."""
        at, dims = self._layout, value.dim()
        if dims > _MOST_DIMS:
            return False
        impl = tensor_id(value)
        self._addresses[0].append(id(value) + _WORD * at.wrapper_impl)
        words = [at.storage, at.dims, *at.rest]
        words += [*range(at.sizes, at.sizes + dims), *range(at.strides, at.strides + dims)]
        self._addresses[1].extend(impl + _WORD * i for i in words)
        self._addresses[2].append(storage_id(value) + _WORD * at.data)
        if training:
            self._addresses[1].append(impl + _WORD * at.autograd)
            (autograd,) = _read(impl + _WORD * at.autograd, 1)
            if autograd:
                self._addresses[2].append(autograd + _WORD * at.requires_grad)
        return True

    def seal(self) -> None:
        """Remember the words' current values."""
        for addresses in self._addresses:
            # Sorted, since neighbours share cache lines.
            index = np.unique(np.array(addresses, dtype=np.int64)) // _WORD - 1
            self._levels.append((index, _memory().take(index).tobytes()))

    def unchanged(self) -> bool:
        """Whether all words have the values that they had at `seal`."""
        take = _memory().take
        return all(take(index).tobytes() == before for index, before in self._levels)


@functools.cache
def layout() -> Layout | None:
    """Where this Python and this torch keep the watched words; None if they cannot be found."""
    if sys.implementation.name != "cpython" or sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != _WORD:
        return None
    try:
        return _find()
    except (IndexError, StopIteration, ValueError):
        return None


@functools.cache
def _memory() -> np.ndarray:
    """The memory of this process as words, from the second one on, since an array cannot start at NULL."""
    everything: Any = (ctypes.c_uint64 * (1 << 44)).from_address(_WORD)
    words: np.ndarray = np.frombuffer(everything, dtype=np.uint64)
    return words


def _read(address: int, count: int) -> list[int]:
    first = address // _WORD - 1
    return [int(word) for word in _memory()[first : first + count]]


def _bytes_at(address: int) -> int:
    """How many bytes were allocated at an address."""
    usable = ctypes.CDLL(None).malloc_usable_size
    usable.restype, usable.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
    return int(usable(address))


def _find() -> Layout:
    """Find the positions. Raises IndexError, StopIteration or ValueError if a sample is not as expected."""
    sample = torch.empty(64).as_strided((1,) * _MOST_DIMS, _STRIDES, _OFFSET)
    strided = _impl_words(sample)
    sized = _impl_words(torch.empty(1).expand(_SIZES))
    sizes, strides, offset = _run(sized, _SIZES), _run(strided, _STRIDES), strided.index(_OFFSET)
    storage = strided.index(storage_id(sample))
    (dims,) = set(_changed(_impl_words(torch.empty(1)), _impl_words(torch.empty(1, 1)))) & {sizes - 1}

    typed = torch.empty(4)
    before = _impl_words(typed)
    typed.data = typed.data.view(torch.int32)
    kind = _changed(before, _impl_words(typed))
    conjugate = torch.empty(4, dtype=torch.complex64)
    before = _impl_words(conjugate)
    conjugate.data = conjugate.data.conj()
    keys = _changed(before, _impl_words(conjugate))

    leaf = torch.empty(4)
    before = _impl_words(leaf)
    leaf.requires_grad_(True)
    (autograd,) = _changed(before, _impl_words(leaf))
    kept = _impl_words(leaf)[autograd]
    count = _bytes_at(kept) // _WORD
    before = _read(kept, count)
    leaf.requires_grad_(False)
    (requires_grad,) = _changed(before, _read(kept, count))
    leaf.requires_grad_(True)

    if not (kind and keys):
        raise ValueError("torch keeps this elsewhere")

    numbered: dict[str, object] = {"key": 1}
    before = _read(id(numbered), 6)
    numbered["key"] = "other"
    (version,) = _changed(before, _read(id(numbered), 6))
    listed = [sample, leaf]
    length, items = _read(id(listed) + 2 * _WORD, 2)
    if length != 2 or _read(items, 2) != [id(sample), id(leaf)]:
        raise ValueError("Python keeps a list's elements elsewhere")
    return Layout(
        dict_version=version,
        wrapper_impl=_read(id(leaf), leaf.__class__.__basicsize__ // _WORD).index(tensor_id(leaf)),
        storage=storage,
        autograd=autograd,
        dims=dims,
        sizes=sizes,
        strides=strides,
        rest=tuple(sorted({offset, *kind, *keys})),
        data=_read(storage_id(leaf), _bytes_at(storage_id(leaf)) // _WORD).index(leaf.data_ptr()),
        requires_grad=requires_grad,
    )


def _impl_words(tensor: torch.Tensor) -> list[int]:
    return _read(tensor_id(tensor), _bytes_at(tensor_id(tensor)) // _WORD)


def _changed(before: Sequence[int], after: Sequence[int]) -> list[int]:
    return [i for i, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]


def _run(words: list[int], values: tuple[int, ...]) -> int:
    """The position at which these values follow each other."""
    return next(i for i in range(len(words)) if tuple(words[i : i + len(values)]) == values)
