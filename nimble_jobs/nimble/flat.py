"""A model as the engine wants it: called with its tensors alone, by position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nimble_jobs.engine.private.tensors import tree_flatten, tree_unflatten
from nimble_jobs.engine.tree import has_own_names, named_leaves
from nimble_jobs.errors import CannotRecord
from nimble_jobs.nimble.signature import PLAIN, Signature


class Flat(nn.Module):
    """Puts a call's tensors back into the arguments that the model takes."""

    def __init__(self, module: nn.Module, signature: Signature) -> None:
        super().__init__()
        self.module = module
        self.training = module.training
        self._signature = signature

    def forward(self, *tensors: torch.Tensor) -> Any:
        args, kwargs = self._signature.arguments(tensors)
        before = tree_flatten((args, kwargs))
        result = self.module(*args, **kwargs)
        leaves, nesting = tree_flatten((args, kwargs))
        if nesting != before[1] or any(a is not b for a, b in zip(leaves, before[0], strict=True)):
            raise CannotRecord("the model changes a list or dict among its arguments; a replay would not")
        return result


def flat(module: nn.Module, signature: Signature) -> nn.Module:
    """The module itself if it takes nothing but tensors by position, else a `Flat` around it."""
    return module if signature.plain else Flat(module, signature)


@dataclass(frozen=True, kw_only=True)
class Structure:
    """How a model's outputs are nested."""

    names: tuple[str, ...]  # of the tensors, in order
    leaves: tuple[Any, ...]  # constants, with None in the tensors' places
    places: tuple[int, ...]  # of the tensors among the leaves
    nesting: Any
    lone: bool  # one tensor and nothing around it

    @classmethod
    def of(cls, result: Any) -> Structure:
        """Raises CannotRecord for outputs that a replay could not make anew."""
        named = named_leaves(result, "" if has_own_names(result) else "output")
        leaves, nesting = tree_flatten(result)
        for name, leaf in named:
            if not isinstance(leaf, (torch.Tensor, *PLAIN)):
                raise CannotRecord(
                    f"the model's output {name!r} is a {type(leaf).__name__}; expected tensors and plain constants "
                    "in tuples, lists, dicts or classes that torch's pytree knows"
                )
        places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        return cls(
            names=tuple(named[i][0] for i in places),
            leaves=tuple(None if i in places else leaf for i, leaf in enumerate(leaves)),
            places=places,
            nesting=nesting,
            lone=isinstance(result, torch.Tensor),
        )

    def build(self, tensors: list[torch.Tensor]) -> Any:
        """The outputs, as the model nests them."""
        if self.lone:
            return tensors[0]
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, self.nesting)
