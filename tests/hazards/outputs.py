"""What forward returns: structures, and what is no tensor."""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict, defaultdict, deque, namedtuple
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils import _pytree

from tests.hazards.case import Case, Cases, Data

CASES: list[Case] = []
case = Cases("outputs", CASES)


def x(data: Data) -> torch.Tensor:
    return data.floats(3, 4)


Pair = namedtuple("Pair", ["left", "right"])


class Typed(NamedTuple):
    y: torch.Tensor
    name: str = "typed"


@dataclasses.dataclass
class Plain:
    y: torch.Tensor
    n: int


@dataclasses.dataclass
class Registered:
    y: torch.Tensor
    n: int


_pytree.register_dataclass(Registered)


class Kind(enum.Enum):
    GOOD = 1


class Attributes(dict):  # type: ignore[type-arg]
    """A dict with attributes, as libraries return."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Out:
    def __init__(self, x: torch.Tensor) -> None:
        self._x = x

    @property
    def y(self) -> torch.Tensor:
        return self._x * 2


@case(x, recorded=True)
def nested_structures(_: Any, x: torch.Tensor) -> Any:
    return {"a": [x + 1, (x * 2, {"b": x - 1})], "c": ()}


@case(x, recorded=True)
def constants_beside_tensors(_: Any, x: torch.Tensor) -> Any:
    return x + 1, None, 3, 2.5, "name", True, Kind.GOOD, b"bytes", 1j


@case(x, recorded=True)
def a_named_tuple(_: Any, x: torch.Tensor) -> Any:
    return Pair(x + 1, Typed(x * 2))


@case(x, recorded=True)
def an_ordered_dict(_: Any, x: torch.Tensor) -> Any:
    return OrderedDict(b=x + 1, a=x * 2)


@case(x, recorded=True)
def a_dict_in_another_order_than_its_keys(_: Any, x: torch.Tensor) -> Any:
    return {"z": x + 1, "a": x * 2, "m": 1}


@case(x)
def a_default_dict(_: Any, x: torch.Tensor) -> Any:
    found = defaultdict(list)
    found["a"].append(x + 1)
    return found


@case(x)
def a_deque(_: Any, x: torch.Tensor) -> Any:
    return deque([x + 1, x * 2])


@case(x)
def a_plain_dataclass(_: Any, x: torch.Tensor) -> Any:
    return Plain(x + 1, 3)


@case(x, recorded=True)
def a_registered_dataclass(_: Any, x: torch.Tensor) -> Any:
    return Registered(x + 1, 3)


@case(x)
def a_dict_with_attributes(_: Any, x: torch.Tensor) -> Any:
    return Attributes(y=x + 1)


@case(x)
def a_set_of_tensors(_: Any, x: torch.Tensor) -> Any:
    return x + 1, frozenset([1, 2])


@case(x)
def an_object(_: Any, x: torch.Tensor) -> Any:
    return x + 1, object


@case(x)
def a_generator(_: Any, x: torch.Tensor) -> Any:
    return (x * i for i in range(3))


@case(x)
def nothing(_: Any, x: torch.Tensor) -> None:
    x.add_(1)


@case(x)
def no_tensor(_: Any, x: torch.Tensor) -> int:
    return x.shape[0]


@case(x)
def an_empty_dict(_: Any, x: torch.Tensor) -> Any:
    return {}


@case(x)
def a_float_of_its_values(_: Any, x: torch.Tensor) -> Any:
    return {"y": x + 1, "loss": float(x.mean())}


@case(x)
def a_list_of_its_values(_: Any, x: torch.Tensor) -> Any:
    return {"logits": x * 2, "labels": x.argmax(-1).tolist()}


@case(x)
def labels_by_name(_: Any, x: torch.Tensor) -> Any:
    return {"logits": x * 2, "names": ["abcd"[i] for i in x.argmax(-1)]}


@case(x)
def a_numpy_array(_: Any, x: torch.Tensor) -> Any:
    return x * 2, x.cpu().numpy() * 2


@case(x)
def a_numpy_scalar(_: Any, x: torch.Tensor) -> Any:
    return x * 2, np.float32(x.cpu().numpy().mean())


@case(x)
def a_numpy_scalar_that_is_constant(_: Any, x: torch.Tensor) -> Any:
    return x * 2, np.float32(3)


@case(x)
def a_string_of_its_values(_: Any, x: torch.Tensor) -> Any:
    return x * 2, f"mean {x.mean():.4f}"


@case(x)
def as_many_outputs_as_values(_: Any, x: torch.Tensor) -> Any:
    return [row for row in x if row.sum() > 0] + [x]


@case(x)
def keys_by_values(_: Any, x: torch.Tensor) -> Any:
    return {int(x.argmax()): x * 2}


@case(x, lambda: {"n": 0})
def a_counter_among_its_outputs(m: Any, x: torch.Tensor) -> Any:
    m.n += 1
    return x * 2, m.n


@case(x, lambda: {"n": 0})
def a_structure_that_grows(m: Any, x: torch.Tensor) -> Any:
    m.n += 1
    return [x * i for i in range(m.n)] + [x]


@case(x, lambda: {"n": 0})
def a_structure_that_changes_once(m: Any, x: torch.Tensor) -> Any:
    m.n += 1
    return (x * 2, x) if m.n < 4 else [x * 2, x]


@case(x, recorded=True)
def shapes_and_sizes(_: Any, x: torch.Tensor) -> Any:
    return x * 2, x.dim(), x.numel(), tuple(x.shape)


@case(x)
def a_torch_size(_: Any, x: torch.Tensor) -> Any:
    return x * 2, x.shape


@case(x, recorded=True)
def dtypes_and_devices(_: Any, x: torch.Tensor) -> Any:
    return x * 2, x.dtype, x.device, x.layout


@case(lambda d: (d.floats(3), "label"), recorded=True)
def returns_its_constants(_: Any, x: torch.Tensor, name: str) -> Any:
    return {"y": x * 2, "name": name}


@case(lambda d: (d.floats(3), d.floats(2, salt=1)), recorded=True)
def inputs_among_its_outputs(_: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    return {"x": x, "y": (y, y * 2)}


@case(x, lambda: {"c": torch.arange(4.0)}, recorded=True)
def a_constant_buffer_among_its_outputs(m: Any, x: torch.Tensor) -> Any:
    return x * m.c, m.c


@case(x, recorded=True)
def a_new_constant_tensor(_: Any, x: torch.Tensor) -> Any:
    return x * 2, torch.arange(3, device=x.device), torch.zeros(2, device=x.device)


@case(x)
def a_constant_tensor_alone(_: Any, x: torch.Tensor) -> Any:
    return torch.arange(3, device=x.device)


@case(x)
def a_tensor_on_the_host(_: Any, x: torch.Tensor) -> Any:
    return x * 2, torch.ones(3)


@case(x)
def a_tensor_on_meta(_: Any, x: torch.Tensor) -> Any:
    return x * 2, torch.ones(3, device="meta")


@case(x)
def a_sparse_tensor(_: Any, x: torch.Tensor) -> Any:
    return (x * 2).to_sparse()


@case(x)
def a_nested_tensor(_: Any, x: torch.Tensor) -> Any:
    return torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged).values()


@case(x)
def a_parameter_of_its_making(_: Any, x: torch.Tensor) -> Any:
    return torch.nn.Parameter(x * 2, requires_grad=False)


@case(x, recorded=True)
def an_output_without_elements(_: Any, x: torch.Tensor) -> Any:
    return x[:0] * 2, x.sum()


@case(x, recorded=True)
def a_scalar_output(_: Any, x: torch.Tensor) -> Any:
    return x.sum()


@case(x, recorded=True)
def a_boolean_output(_: Any, x: torch.Tensor) -> Any:
    return x > 0, (x > 0).any()


@case(x, recorded=True)
def an_integer_output(_: Any, x: torch.Tensor) -> Any:
    return x.argsort(-1), x.topk(2).indices, x.clamp(-100, 100).to(torch.int8)


@case(x, recorded=True)
def a_named_tuple_of_torch(_: Any, x: torch.Tensor) -> Any:
    return x.max(1), torch.topk(x, 2)


@case(lambda d: d.ints(5, 3, 4))
def nothing_but_integers(_: Any, x: torch.Tensor) -> Any:
    return x.sum(1), x.amax(0)


@case(x)
def a_function(_: Any, x: torch.Tensor) -> Any:
    return x * 2, lambda: x


@case(x)
def a_lazy_property(_: Any, x: torch.Tensor) -> Any:
    return Out(x)
