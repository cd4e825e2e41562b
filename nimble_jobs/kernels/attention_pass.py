"""A pass over the graph that a compiler is given: puts the operator of `attention` in place of scaled dot-product
attention, where our kernel is faster.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.nn import functional

from nimble_jobs.engine.encode import dtype
from nimble_jobs.engine.private.modes import modes_off
from nimble_jobs.engine.private.tensors import version
from nimble_jobs.kernels import choices
from nimble_jobs.kernels.attention import OPERATOR, Mask, Shape, Strides, Wanted, compiled, outer_strides
from nimble_jobs.kernels.fx_nodes import fixed_example, same_strides
from nimble_jobs.kernels.own_kernels import digest_of
from nimble_jobs.kernels.static_triton import capability_of
from nimble_jobs.kernels.ways import Ways
from nimble_jobs.task_times import TaskTimes

_GAIN = 0.95  # ours must take less than this share
_CALL = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_CONSTANT = {  # what masks are made of: the same whenever it is computed
    torch.arange,
    torch.ones,
    operator.add,
    operator.and_,
    operator.eq,
    operator.ge,
    operator.getitem,
    operator.gt,
    operator.le,
    operator.lt,
    operator.or_,
    operator.sub,
    "expand",
    "new_ones",
    "to",
    "unsqueeze",
    "view",
}
_LARGEST_CONSTANT = 1 << 24  # elements


def rewrite(graph: Graph, device: torch.device, wanted: Wanted | None = None) -> int:
    """Put our operator into a graph of torch's functions, whose nodes carry fake tensors in `meta["example_value"]`.

    `wanted` says with which tile ours is to compute a shape; by default, the fastest. A mask that hides nothing,
    whatever the inputs are, is left out, also where the library computes. Returns how many operators there are.
    """
    wanted = wanted or fastest
    count = 0
    shows_all: dict[Node, bool] = {}  # by mask
    for node in list(graph.nodes):
        if node.target is not functional.scaled_dot_product_attention:
            continue
        call = dict(zip(_CALL, node.args, strict=False)) | dict(node.kwargs)
        mask = call.get("attn_mask")
        if isinstance(mask, Node) and mask not in shows_all:
            shows_all[mask] = _shows_all(mask)
        if isinstance(mask, Node) and shows_all[mask]:
            call["attn_mask"] = mask = None
            node.args = tuple(call[name] for name in _CALL[:3])
            node.kwargs = {name: value for name, value in call.items() if name not in _CALL[:3]}
        shape = _shape(call, device)
        copies = _copies(node, shape) if shape is not None else None
        tile = wanted(shape, device) if shape is not None and copies is not None else None
        if shape is None or tile is None:
            continue
        scale = float(call.get("scale") or shape.dim**-0.5)
        with graph.inserting_before(node):
            seen = None if mask is None else _once(graph, _plainest(mask))
            args = (call["query"], call["key"], call["value"], seen, shape.causal, scale, tile)
            made = graph.call_function(OPERATOR, args)
            turned = graph.call_method("transpose", (made, 1, 2))
            if copies:
                turned = graph.call_method("contiguous", (turned,))
        turned.meta = dict(node.meta)
        node.replace_all_uses_with(turned)
        graph.erase_node(node)
        count += 1
    for mask, useless in shows_all.items():
        if useless:
            _erase_unused(graph, mask)
    return count


def fastest(shape: Shape, device: torch.device) -> str | None:
    """The tile with which our kernel is fastest; None if the library is, now or as measured earlier."""
    more = {"task": "attention", "code": digest_of("attention", "attention_triton")}
    ways, ahead = ("library", *shape.tiles), choices.nothing_ahead  # of the few shapes `_times` begins with all tiles
    way = choices.way_for(shape, ways, device, lambda: _times(shape, device), ahead, **more)
    return None if way == "library" else way


def _times(shape: Shape, device: torch.device) -> TaskTimes:
    """Measured over queries, keys and values that lie as one product leaves them, or two if there are more keys."""
    generator = torch.Generator(device).manual_seed(0)  # leaves the process's random state alone

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, device=device, dtype=dtype(shape.dtype))

    batch, heads, dim = shape.batch, shape.heads, shape.dim
    if shape.rows == shape.keys:
        q, k, v = random(batch, shape.rows, 3, heads, dim).transpose(1, 3).unbind(2)
    else:
        q = random(batch, shape.rows, heads, dim).transpose(1, 2)
        k, v = random(batch, shape.keys, 2, heads, dim).transpose(1, 3).unbind(2)
    mask = None
    if shape.mask != "none":  # of some texts, each with its own length
        lengths = torch.linspace(shape.keys / 2, shape.keys, batch, device=device).ceil()
        mask = torch.arange(shape.keys, device=device) < lengths[:, None, None, None]
        if shape.mask == "added":
            mask = torch.where(mask, 0.0, torch.finfo(q.dtype).min).to(q.dtype)
    scale = dim**-0.5
    whole = mask.expand(batch, 1, shape.rows, shape.keys).contiguous() if mask is not None else None

    def library() -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, whole, 0.0, shape.causal, scale=scale)

    theirs = OPERATOR(q, k, v, mask, shape.causal, scale, "")
    out = torch.empty_like(theirs)
    strides = Strides(
        q=outer_strides(q.stride()),
        k=outer_strides(k.stride()),
        v=outer_strides(v.stride()),
        mask=(0, 0, 0, 0) if mask is None else (shape.keys, 0, 0, 1),
    )

    def ours(tile: str) -> Callable[[], Any]:
        out.fill_(float("nan"))
        kernel = compiled(shape, strides, scale, tile, capability_of(device))
        return functools.partial(kernel, q, k, v, q if mask is None else mask, out)

    for tile in shape.tiles:
        compiled.ahead(shape, strides, scale, tile, capability_of(device))
    ways = Ways(shape.dtype)
    for tile in shape.tiles:
        ways.add(tile, functools.partial(ours, tile), theirs, out)
    return ways.times(shape.words, library, _GAIN, device)


def _shape(call: dict[str, Any], device: torch.device) -> Shape | None:
    """Of a call of torch's function; None if ours cannot compute it."""
    scale = call.get("scale")
    if call.get("dropout_p", 0.0) != 0.0 or call.get("enable_gqa", False):
        return None
    if scale is not None and not (isinstance(scale, int | float) and scale > 0):
        return None
    q, k, v = (fixed_example(call.get(name)) for name in _CALL[:3])
    if q is None or k is None or v is None or q.device.type != device.type or q.dim() != 4:
        return None
    if len({q.dtype, k.dtype, v.dtype}) != 1 or k.shape != v.shape or k.shape[:2] != q.shape[:2]:
        return None
    if k.shape[3] != q.shape[3] or any(each.stride(3) != 1 for each in (q, k, v)):
        return None
    mask: Mask = "none"
    if call.get("attn_mask") is not None:
        given = fixed_example(call["attn_mask"])
        if given is None or given.dim() not in (2, 4) or given.dtype not in (torch.bool, q.dtype):
            return None
        sizes = (*q.shape[:3], k.shape[2])[-given.dim() :]
        if any(size not in (1, whole) for size, whole in zip(given.shape, sizes, strict=True)):
            return None
        mask = "true" if given.dtype == torch.bool else "added"
    shape = Shape(
        dtype=str(q.dtype).removeprefix("torch."),
        batch=q.shape[0],
        heads=q.shape[1],
        rows=q.shape[2],
        keys=k.shape[2],
        dim=q.shape[3],
        mask=mask,
        causal=bool(call.get("is_causal", False)),
    )
    return shape if shape.tiles else None


def _copies(node: Node, shape: Shape) -> bool | None:
    """Whether our result has to be copied to lie as torch's does; None if it cannot be like that."""
    value = fixed_example(node)
    if value is None or str(value.dtype) != f"torch.{shape.dtype}":  # under autocast it may be another
        return None
    ours = (shape.rows * shape.heads * shape.dim, shape.dim, shape.heads * shape.dim, 1)
    if same_strides(value, ours):
        return False
    return True if value.is_contiguous() else None


def _plainest(mask: Node) -> Node:
    """What a mask was spread from, by repetition or beside masks that show everything: it hides the same."""
    while _untouched(mask):
        if mask.target == "expand":
            rest = [mask.args[0]]
        elif mask.target is operator.and_:
            rest = [each for each in mask.args if not (isinstance(each, Node) and _shows_all(each))]
        else:
            return mask
        value = fixed_example(rest[0]) if len(rest) == 1 else None
        if value is None or value.dim() != 4 or not isinstance(rest[0], Node):
            return mask
        mask = rest[0]
    return mask


def _untouched(node: Node) -> bool:
    """Whether nobody writes into a node's tensor, through whichever view."""
    value = node.meta.get("example_value")
    return not isinstance(value, torch.Tensor) or not (value.is_inference() or version(value))


def _once(graph: Graph, mask: Node) -> Node:
    """The mask with four dimensions, of which those that only repeat it have one element."""
    value = mask.meta["example_value"]
    if value.dim() == 2:
        mask, value = graph.call_function(operator.getitem, (mask, (None, None))), value[None, None]
    repeats = [size > 1 and stride == 0 for size, stride in zip(value.shape, value.stride(), strict=True)]
    if any(repeats):
        places = tuple(slice(0, 1) if repeat else slice(None) for repeat in repeats)
        mask, value = graph.call_function(operator.getitem, (mask, places)), value[places]
    mask.meta.setdefault("example_value", value)
    return mask


def _shows_all(mask: Node) -> bool:
    """Whether a mask is true everywhere, whatever the inputs are."""
    value = fixed_example(mask)
    if value is None or value.dtype != torch.bool or value.numel() > _LARGEST_CONSTANT:
        return False
    made: dict[Node, Any] = {}
    with modes_off(), torch.no_grad():
        found = _constant(mask, made)
        return isinstance(found, torch.Tensor) and bool(found.all())


def _erase_unused(graph: Graph, node: Node) -> None:
    """Erase a constant that nothing reads any more, and what only it was computed from."""
    if node.users or node.target not in _CONSTANT:
        return
    before = node.all_input_nodes
    graph.erase_node(node)
    for each in before:
        _erase_unused(graph, each)


def _constant(node: Node, made: dict[Node, Any]) -> Any:
    """The value of a node that does not depend on inputs, on the CPU; None for any other."""
    if node in made:
        return made[node]
    made[node] = None
    if node.op not in ("call_function", "call_method") or node.target not in _CONSTANT:
        return None
    if not _untouched(node):
        return None
    before = {each: _constant(each, made) for each in node.all_input_nodes}
    if any(value is None for value in before.values()):
        return None
    args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda each: before[each])
    kwargs = kwargs | ({"device": "cpu"} if "device" in kwargs else {})
    if node.target == "to":
        args = (args[0], *("cpu" if isinstance(each, str | torch.device) else each for each in args[1:]))
    try:
        if node.op == "call_method":
            found = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            assert callable(node.target)
            found = node.target(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError):  # not what it seemed to be: then it is none
        return None
    made[node] = found
    return found
