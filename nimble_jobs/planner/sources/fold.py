"""Batch normalisation folded into the convolution before it: w' = w s, b' = (b - mean) s + shift, s = scale / sqrt(var
+ eps), for inference.

Which pairs fold is read off a recorded program, where nothing else can hide that reads the convolution's output.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from nimble_jobs.engine.contents import Contents
from nimble_jobs.engine.private.modules import BatchNorm, Convolution, calls_forward_alone
from nimble_jobs.errors import EngineError
from nimble_jobs.schedule import Arg, Program, View

Pairs = tuple[tuple[str, str], ...]  # names of a convolution and of the normalisation of its output

_CONVOLUTIONS = ("aten.convolution.", "aten.cudnn_convolution.", "aten._conv_depthwise2d.")
_NORMALISATIONS = ("aten.native_batch_norm.", "aten.cudnn_batch_norm.")
_WEIGHT = ".weight"


def foldable(program: Program, module: nn.Module) -> Pairs:
    """Pairs of the module's children whose result is the same when the second is folded into the first.

    The program is the module's, with operators as tasks, in evaluation mode.
    """
    names = {port.view.buffer: port.name for port in program.state}
    readers: defaultdict[int, list[int]] = defaultdict(list)
    writers: defaultdict[int, list[int]] = defaultdict(list)
    for task in program.tasks:
        for buffer in {v.buffer for v in task.reads}:
            readers[buffer].append(task.index)
        for buffer in {v.buffer for v in task.writes}:
            writers[buffer].append(task.index)
    returned = {port.view.buffer for port in program.outputs}
    children = dict(module.named_modules())
    pairs = []
    for task in program.tasks:
        if not task.op.startswith(_NORMALISATIONS) or not isinstance(task.args[0], View):
            continue
        between = task.args[0].buffer
        if len(writers[between]) != 1 or readers[between] != [task.index] or between in returned:
            continue
        before = program.tasks[writers[between][0]]
        if not before.op.startswith(_CONVOLUTIONS):
            continue
        ends = before.args[1], task.args[1]
        first, second = (owner(end, names) for end in ends)
        if first is not None and second is not None and _folds(children, first, second, ends=ends, readers=readers):
            pairs.append((first, second))
    uses = Counter(name for pair in pairs for name in pair)
    return tuple((first, second) for first, second in pairs if uses[first] == uses[second] == 1)


def folded(module: nn.Module, pairs: Iterable[tuple[str, str]]) -> nn.Module:
    """A copy of the module with these pairs folded. It shares every other tensor with the module.

    Raises EngineError if the module has no such children.
    """
    contents = Contents(module)
    copied: dict[int, object] = {id(table): type(table)() for table in contents.empty}  # slow to copy one by one
    copied |= {id(t): t for t in (*module.parameters(), *module.buffers(), *contents.tensors().values())}
    twin = copy.deepcopy(module, copied)
    found = []
    for convolution, normalisation in pairs:
        try:
            first, second = twin.get_submodule(convolution), twin.get_submodule(normalisation)
        except AttributeError as e:
            raise EngineError(f"the module cannot be folded as its schedule says: {e}") from e
        assert isinstance(first, Convolution)
        assert isinstance(second, BatchNorm)
        found.append((first, second))
        parent, _, name = normalisation.rpartition(".")
        setattr(twin.get_submodule(parent), name, nn.Identity())
    with torch.no_grad():
        _fold(found)
    return twin


def _fold(pairs: Sequence[tuple[Convolution, BatchNorm]]) -> None:
    """Fold each normalisation into its convolution. What channels need is computed for many pairs at once: a network
    may have hundreds, and a launch on a GPU takes longer than the sum.
    """
    alike: defaultdict[tuple[torch.device, float, bool], list[tuple[Convolution, BatchNorm]]] = defaultdict(list)
    for convolution, normalisation in pairs:
        key = convolution.weight.device, normalisation.eps, convolution.bias is None
        alike[key].append((convolution, normalisation))
    for (_, eps, bare), group in alike.items():
        norms = [normalisation for _, normalisation in group]
        channels = [normalisation.num_features for normalisation in norms]
        factor = (_joined([n.running_var for n in norms]) + eps).rsqrt() * _joined([n.weight for n in norms])
        start = torch.zeros_like(factor) if bare else _joined([c.bias for c, _ in group])
        moved = (start - _joined([n.running_mean for n in norms])) * factor + _joined([n.bias for n in norms])
        for (convolution, _), scale, bias in zip(group, factor.split(channels), moved.split(channels), strict=True):
            weight = convolution.weight
            scaled = weight.float() * scale.reshape(-1, *[1] * (weight.dim() - 1))
            convolution.weight = nn.Parameter(scaled.to(weight.dtype), requires_grad=False)
            convolution.bias = nn.Parameter(bias.to(weight.dtype, copy=True), requires_grad=False)


def _joined(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
    there = [tensor for tensor in tensors if tensor is not None]
    assert len(there) == len(tensors), "a normalisation that is folded has all of its tensors"
    return torch.cat(there).float()


def owner(argument: Arg, names: dict[int, str]) -> str | None:
    """The module whose parameter `weight` this argument is."""
    name = names.get(argument.buffer) if isinstance(argument, View) else None
    return name.removesuffix(_WEIGHT) if name is not None and name.endswith(_WEIGHT) else None


def _folds(
    children: Mapping[str, nn.Module],
    convolution: str,
    normalisation: str,
    *,
    ends: tuple[Arg, Arg],
    readers: dict[int, list[int]],
) -> bool:
    """Whether both are what their names say, and nothing else uses their weights."""
    first, second = children.get(convolution), children.get(normalisation)
    return (
        first is not None
        and second is not None
        and type(first) in (nn.Conv1d, nn.Conv2d, nn.Conv3d)
        and type(second) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        and not second.training
        and all(t is not None for t in (second.weight, second.bias, second.running_mean, second.running_var))
        and calls_forward_alone(first)
        and calls_forward_alone(second)
        and all(isinstance(end, View) and len(readers[end.buffer]) == 1 for end in ends)
    )
