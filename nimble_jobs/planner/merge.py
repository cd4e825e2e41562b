"""Linear layers that read the same become one product, for inference: queries, keys and values of an attention, gates
and what they gate.

One wide product takes less time than several narrow ones: each of these leaves most of a GPU idle. Which layers read
the same is read off a recorded program. The layers then share one weight, and each takes its features of the product;
that the product runs once is left to `engine.shared_products`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable

import torch
from torch import nn
from torch.nn import functional

from nimble_jobs.errors import EngineError
from nimble_jobs.planner.fold import is_plain, owner
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
        if name is None or type(layer) is not nn.Linear or not is_plain(layer):
            continue
        ends = [weight, *bias]
        if not isinstance(x, View) or written[x.buffer] > 1 or (layer.bias is not None) != bool(bias):
            continue
        if all(isinstance(end, View) and end.buffer in names and read[end.buffer] == 1 for end in ends):
            alike[x, bool(bias)].append(name)
    return tuple(tuple(found) for found in alike.values() if len(found) > 1)


def merge(module: nn.Module, groups: Iterable[tuple[str, ...]]) -> None:
    """Put the linear layers of each group over one weight, in place; the tensors that they had are left alone.

    Raises EngineError where the module has no such layers.
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
        start = 0
        for name, layer in zip(group, layers, strict=True):
            parent, _, last = name.rpartition(".")
            module.get_submodule(parent).register_module(last, _Part(weight, bias, start, start + layer.out_features))
            start += layer.out_features


class _Part(nn.Module):
    """Features `start` to `stop` of a product. Input [..., in_features], output [..., stop - start]."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, start: int, stop: int) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.start, self.stop = start, stop
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)[..., self.start : self.stop]


def _joined(*tensors: torch.Tensor) -> nn.Parameter:
    with torch.no_grad():
        return nn.Parameter(torch.cat(tensors), requires_grad=False)
