"""What the host reads while a model is recorded: refused where it may differ between calls, else allowed."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nimble_jobs.engine.record import record, state_of
from nimble_jobs.errors import CannotRecord

Forward = Callable[[Any, torch.Tensor], Any]


class Net(nn.Module):
    """Calls a function with itself and its input."""

    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("ends", torch.tensor([1, 3]))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def recorded(function: Forward) -> int:
    """How many tasks one call records."""
    net = Net(function).eval()
    cpu = torch.device("cpu")
    return len(record(net, {"x": torch.ones(4)}, state_of(net), cpu, net).program.tasks)


def _pointer(x: torch.Tensor) -> float:
    return ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_float))[0]


def _caught(x: torch.Tensor) -> torch.Tensor:
    try:
        return x * float(x.sum())
    except Exception:  # noqa: BLE001 - as careless as models are
        return x


READS: dict[str, Forward] = {
    "tolist": lambda m, x: x * x.tolist()[0],
    "numpy": lambda m, x: x * float(x.numpy()[0]),
    "asarray": lambda m, x: x * float(np.asarray(x)[0]),
    "array": lambda m, x: x * float(np.array([x.sum()])[0]),
    "dlpack": lambda m, x: x * float(np.from_dlpack(x)[0]),
    "data_ptr": lambda m, x: x * _pointer(x),
    "item": lambda m, x: x * x.sum().item(),
    "bool": lambda m, x: x if x.sum() else -x,
    "float": lambda m, x: x * float(x.sum()),
    "index": lambda m, x: [x] * int(x.sum()),
    "range": lambda m, x: sum(x for _ in range(x.sum().long())),
    "repr": lambda m, x: x * len(repr(x)),
    "format": lambda m, x: x * float(f"{x.sum()}"),
    "storage": lambda m, x: x * float(x.untyped_storage()[3]),
    "tensor_split": lambda m, x: torch.cat([p.sum(0, True) for p in x.tensor_split(m.ends)]),
    "split": lambda m, x: torch.cat([p.sum(0, True) for p in x.split([1, int(x.sum()) - 1])]),
    "torch.tensor": lambda m, x: x * torch.tensor([x.sum(), 1.0])[0],
    "torch.Tensor": lambda m, x: x * torch.Tensor([x.sum()]),
    "new_tensor": lambda m, x: x * x.new_tensor([x.sum()]),
    "as_tensor": lambda m, x: x * torch.as_tensor([[x.sum()]]),
    "pickle": lambda m, x: pickle.loads(pickle.dumps(x)),
    "save": lambda m, x: (torch.save(x, io.BytesIO()), x)[1],
    "deepcopy": lambda m, x: copy.deepcopy(x) * 1,
    "apply_": lambda m, x: x.clone().apply_(lambda v: v + 1),
    "map_": lambda m, x: x.clone().map_(x, lambda a, b: a + b),
    "shape": lambda m, x: x * torch.ones(int(x.sum())),
    "full": lambda m, x: torch.full((2,), x.sum()),
    "buffer": lambda m, x: x * float(m.scale),
    "parameter": lambda m, x: x * m.weight.tolist()[0],
    "random": lambda m, x: x * torch.rand(3).tolist()[0],
    "of a view": lambda m, x: x * (x[1:] + 1).flip(0).tolist()[0],
    "written later": lambda m, x: (lambda t: x * t.copy_(x).tolist()[0])(torch.zeros(4)),
    "nonzero": lambda m, x: x.nonzero(),
    "lengths": lambda m, x: nn.utils.rnn.pack_padded_sequence(x.view(2, 2, 1), m.ends, enforce_sorted=False).data,
    "ctc": lambda m, x: nn.functional.ctc_loss(
        x.view(2, 1, 2).log_softmax(2), torch.ones(1, 1).long(), x[:1].long(), torch.tensor([1])
    ),
    "caught": lambda m, x: _caught(x),
}

CONSTANTS: dict[str, Forward] = {
    "item": lambda m, x: x * torch.tensor([2.0, 3.0])[0].item(),
    "tolist": lambda m, x: x * torch.linspace(0, 1, 5).tolist()[1],
    "bool": lambda m, x: x if torch.ones(3).all() else -x,
    "numpy": lambda m, x: x * float(torch.arange(3).numpy()[1]),
    "split": lambda m, x: torch.cat(x.tensor_split(torch.tensor([1, 3]))[1:]),
    "nonzero": lambda m, x: x[torch.tensor([0, 1, 0, 1]).nonzero()[:, 0]],
    "tensor": lambda m, x: x * torch.tensor([torch.tensor(3.0), 1.0])[0],
    "mask": lambda m, x: x[torch.tensor([True, False, True, False])],
    "repr of the module": lambda m, x: x * len(str(m.function)),
    "shape": lambda m, x: x * x.shape[0] * len(x) * x.numel(),
}


@pytest.mark.parametrize("name", READS)
def test_what_the_host_reads_of_inputs_state_and_random_numbers_is_refused_with_its_line(name: str) -> None:
    """Whether the dispatcher shows the read or not, and whether or not the model catches the error."""
    with pytest.raises(CannotRecord, match=r"hazards/test_host_reads\.py:\d+|shape depends"):
        recorded(READS[name])


@pytest.mark.parametrize("name", CONSTANTS)
def test_what_the_host_reads_of_constants_is_the_same_at_each_replay(name: str) -> None:
    """So it may be read, and work may be shaped by it."""
    assert recorded(CONSTANTS[name])


def test_a_read_in_a_function_of_autograd_is_seen() -> None:
    """Its Python code runs under the same modes."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * x.tolist()[0]

    with pytest.raises(CannotRecord, match=r"tolist\(\) at"):
        recorded(lambda m, x: Scaled.apply(x))


def test_a_buffer_that_is_given_other_memory_is_refused_by_name() -> None:
    """Through `.data`, which keeps the tensor's identity."""

    def replaced(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.scale.data = 0.9 * m.scale.data + x.mean()
        return x * m.scale

    with pytest.raises(CannotRecord, match=r"replaces the data of its tensor 'scale' at hazards"):
        recorded(replaced)
