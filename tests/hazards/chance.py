"""Random numbers in evaluation mode: torch's, Python's, numpy's, generators, and what is shuffled."""

from __future__ import annotations

import os
import random
import secrets
import time
import uuid
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from tests.hazards.case import Case, Cases, Data

CASES: list[Case] = []
case = Cases("chance", CASES)


def x(data: Data) -> torch.Tensor:
    return data.floats(3, 4)


@case(x)
def adds_noise(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn_like(x)


@case(x)
def adds_noise_of_several_kinds(_: Any, x: torch.Tensor) -> torch.Tensor:
    y = x + torch.rand(3, 4, device=x.device)
    return y + torch.empty_like(x).normal_() + torch.randint(0, 5, (4,), device=x.device)


@case(x)
def drops_in_evaluation(_: Any, x: torch.Tensor) -> torch.Tensor:
    return functional.dropout(x, 0.5, training=True)


@case(x)
def draws_from_a_distribution(_: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.bernoulli(x.sigmoid()) + torch.multinomial(x.softmax(-1), 2).sum()


@case(x)
def permutes_at_random(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x[torch.randperm(3, device=x.device)]


@case(x)
def a_generator_of_its_own(_: Any, x: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator(x.device).manual_seed(3)
    return x + torch.randn(3, 4, generator=generator, device=x.device)


class WithGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(3, 4, generator=self.generator).to(x.device)


case(x)(WithGenerator)


@case(x)
def seeds_torch(_: Any, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(5)
    return x + torch.randn_like(x)


@case(x)
def pythons_random(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x * random.random()


@case(x)
def pythons_rare_random(_: Any, x: torch.Tensor) -> torch.Tensor:
    return -x if random.random() < 0.1 else x


@case(x)
def pythons_random_that_is_not_used(_: Any, x: torch.Tensor) -> torch.Tensor:
    random.random()
    return x * 2


@case(x)
def shuffles_its_layers(_: Any, x: torch.Tensor) -> torch.Tensor:
    order = [torch.sin, torch.exp2, torch.tanh]
    random.shuffle(order)
    for function in order:
        x = function(x)
    return x


@case(x)
def numpys_random(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x * float(np.random.rand())


@case(x)
def numpys_random_that_is_not_used(_: Any, x: torch.Tensor) -> torch.Tensor:
    np.random.rand()
    return x * 2


@case(x)
def numpys_random_mask(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x * torch.from_numpy(np.random.randint(0, 2, (3, 4))).to(x.device)


class WithNumpyGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.generator.random()


case(x)(WithNumpyGenerator)


class WithPythonsGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.generator.random()


case(x)(WithPythonsGenerator)


@case(x)
def torchs_random_on_the_host(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x * float(torch.rand(()))


@case(x)
def drops_a_layer_at_random(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x if torch.rand(1).item() < 0.2 else x * 2


@case(x)
def restores_the_random_state(_: Any, x: torch.Tensor) -> torch.Tensor:
    state = torch.get_rng_state()
    y = x + torch.randn(3, 4).to(x.device)
    torch.set_rng_state(state)
    return y


@case(x)
def forks_the_random_state(_: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        return x + torch.randn_like(x)


@case(x)
def noise_into_a_buffer_of_its_own(_: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    y.uniform_(-1, 1)
    return x + y


@case(x, lambda: {"n": torch.zeros(3, 4)})
def noise_into_its_state(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.n.add_(torch.randn_like(x))
    return x + m.n


@case(x)
def rrelu_and_gumbel(_: Any, x: torch.Tensor) -> torch.Tensor:
    return functional.rrelu(x, training=True) + functional.gumbel_softmax(x)


# What no random state tells: nothing can be equal, so that only a refusal is right.


def of_the_clock(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x * (time.time_ns() % 1000 + 1)


def of_the_system(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x * (os.urandom(1)[0] + 1)


def of_secrets(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x * (secrets.randbelow(1000) + 1)


def of_identifiers(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x * (uuid.uuid4().int % 1000 + 1)


UNREPEATABLE = (of_the_clock, of_the_system, of_secrets, of_identifiers)
