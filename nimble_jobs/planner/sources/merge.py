"""Linear layers that read the same become one product, for inference: queries, keys and values of an attention, gates
and what they gate.

One wide product takes less time than several narrow ones: each of these leaves most of a GPU idle. Which layers read
the same is read off a recorded program. The layers then share one weight, and each takes its features of the product.
That the product runs once is seen to by the layers themselves, and in a compiled graph by `kernels.shared_products`.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional

from nimble_jobs.engine.private.modules import calls_forward_alone
from nimble_jobs.engine.private.tensors import version
from nimble_jobs.errors import EngineError
from nimble_jobs.planner.sources.fold import owner
from nimble_jobs.schedule import Program, View

Groups = tuple[tuple[str, ...], ...]  # names of linear layers, in each group those that read the same

_WITH_BIAS, _WITHOUT = "aten.addmm.", "aten.mm."


def mergeable(program: Program, module: nn.Module) -> Groups:
    """Groups of two or more of the module's linear layers whose results are the same as one product.

    The program is the module's, with operators as tasks.
    """
    names = {port.view.buffer: port.name for port in program.state}
    written = Counter(buffer for task in program.tasks for buffer in {v.buffer for v in task.writes})
    read = Counter(buffer for task in program.tasks for buffer in {v.buffer for v in task.reads})
    children = dict(module.named_modules())
    alike: defaultdict[Hashable, list[str]] = defaultdict(list)
    for task in program.tasks:
        if not task.op.startswith((_WITH_BIAS, _WITHOUT)):
            continue
        *bias, x, weight = task.args[:3] if task.op.startswith(_WITH_BIAS) else task.args[:2]
        name = owner(weight, names)
        layer = children.get(name) if name is not None else None
        if name is None or type(layer) is not nn.Linear or not calls_forward_alone(layer):
            continue
        ends = [weight, *bias]
        if not isinstance(x, View) or written[x.buffer] > 1 or (layer.bias is not None) != bool(bias):
            continue
        if all(isinstance(end, View) and end.buffer in names and read[end.buffer] == 1 for end in ends):
            alike[x, bool(bias)].append(name)
    return tuple(tuple(found) for found in alike.values() if len(found) > 1)


def merge(module: nn.Module, groups: Iterable[tuple[str, ...]]) -> None:
    """Put the linear layers of each group over one weight, in place; the tensors that they had are left alone.

    Raises EngineError if the module has no such layers.
    """
    for group in groups:
        try:
            found = [module.get_submodule(name) for name in group]
        except AttributeError as e:
            raise EngineError(f"the module's layers cannot be merged as its schedule says: {e}") from e
        layers = [layer for layer in found if type(layer) is nn.Linear]
        if len(layers) != len(group):
            raise EngineError(f"the module's layers cannot be merged: expected linear ones, found {found}")
        weight = _joined(*(layer.weight for layer in layers))
        bias = _joined(*(layer.bias for layer in layers)) if layers[0].bias is not None else None
        start, shared = 0, _Shared(len(group))
        for name, layer in zip(group, layers, strict=True):
            parent, _, last = name.rpartition(".")
            module.get_submodule(parent).register_module(
                last, _Part(weight, bias, start, start + layer.out_features, shared)
            )
            start += layer.out_features


@dataclass(frozen=True)
class _Kept:
    x: weakref.ref[torch.Tensor]
    version: int  # which a write into x raises
    product: torch.Tensor
    left: int  # layers that have yet to ask for it


class _Shared:
    """The product that the layers of a group ask for one after another. It is let go once all have."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._kept: _Kept | None = None

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x @ weight.T + bias`; the one before if it was of the same x, unchanged since."""
        kept = self._kept
        if kept is None or kept.x() is not x or kept.version != version(x):
            kept = _Kept(weakref.ref(x), version(x), functional.linear(x, weight, bias), self._layers)
        left = kept.left - 1
        self._kept = replace(kept, left=left) if left else None
        return kept.product


class _Part(nn.Module):
    """Features `start` to `stop` of a product. Input [..., in_features], output [..., stop - start]."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, start: int, stop: int, shared: _Shared) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.start, self.stop = start, stop
        self._shared = shared
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or x.is_inference():  # without a version that would tell of writes
            product = functional.linear(x, self.weight, self.bias)
        else:
            product = self._shared.product(x, self.weight, self.bias)
        return product[..., self.start : self.stop]


def _joined(*tensors: torch.Tensor) -> nn.Parameter:
    with torch.no_grad():
        return nn.Parameter(torch.cat(tensors), requires_grad=False)
