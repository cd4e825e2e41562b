"""What a hazard is made of: a module that starts the same each time it is made, and calls that differ from its example.

`CASES` of each file beside this one are functions of a module and its arguments, which `Cases` wraps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

CALLS = 5
# The example is of scale 1; later calls have other signs and scales, so that whatever looks at values sees others.
_SCALES = (1.0, -1.0, 100.0, 1e-3, -5.0, 1.0)

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Data:
    """Makes the data of one call: the example (`turn` 0) or a later one, each time the same."""

    turn: int
    device: torch.device

    def _generator(self, salt: int) -> torch.Generator:
        return torch.Generator().manual_seed(1000 * self.turn + salt)

    def floats(self, *shape: int, dtype: torch.dtype = torch.float32, salt: int = 0) -> torch.Tensor:
        """Normal numbers; of all calls but the example's and the last in other scales and signs."""
        kind = torch.complex64 if dtype.is_complex else torch.float32
        drawn = torch.randn(shape, generator=self._generator(salt), dtype=kind)
        return (
            (drawn.abs() if self.turn in (1, 2) and not dtype.is_complex else drawn)
            .mul(_SCALES[self.turn])
            .to(self.device, dtype)
        )

    def ints(self, below: int, *shape: int, dtype: torch.dtype = torch.int64, salt: int = 0) -> torch.Tensor:
        """Integers of [0, below); the example has only those of the lower half."""
        bound = below if self.turn else max(1, below // 2)
        return torch.randint(0, bound, shape, generator=self._generator(salt)).to(self.device, dtype)

    def lengths(self, count: int, most: int) -> torch.Tensor:
        """Lengths of [1, most]; the example's are all `most`."""
        drawn = torch.randint(1, most + 1, (count,), generator=self._generator(7))
        return (drawn if self.turn else torch.full((count,), most)).to(self.device)

    def order(self, count: int) -> torch.Tensor:
        """A permutation; the example's is the identity."""
        return (torch.randperm(count, generator=self._generator(8)) if self.turn else torch.arange(count)).to(
            self.device
        )

    def mask(self, rows: int, columns: int) -> torch.Tensor:
        """Which are attended to: all in the example; later padded on the right, on the left, at random, only one."""
        at = torch.arange(columns).expand(rows, columns)
        keep = torch.randint(1, columns, (rows, 1), generator=self._generator(9))
        made = {
            0: torch.ones(rows, columns, dtype=torch.bool),
            1: at < keep,
            2: at >= columns - keep,
            3: (torch.rand(rows, columns, generator=self._generator(10)) < 0.5) | (at == 0),
            4: at == 0,
        }
        return made.get(self.turn, made[0]).clone().to(self.device)


class Apply(nn.Module):
    """A function of the module and its arguments as a module. Its buffers, parameters and attributes are given."""

    def __init__(self, function: Callable[..., Any], own: dict[str, Any]) -> None:
        super().__init__()
        self.function = function
        for name, value in own.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One hazard."""

    name: str
    make: Callable[[], nn.Module]
    call: Callable[[Data], Call]
    recorded: bool | None  # must a schedule hold it? None where a refusal is as good
    between: Callable[[nn.Module, int], None]  # what happens to the module before each call after `prepare`
    outside: Callable[[nn.Module], Any]  # what the module keeps outside of itself, to be compared as its state is
    misuse: bool  # refused as a call that was not meant, with `fallback` too
    advanced: bool  # what it keeps outside of itself, `prepare` cannot put back: eager goes on from there
    strides: bool  # are outputs to lie as in eager? Not where a call's inputs lie otherwise than the example's
    attributes: bool  # are Python attributes, which replays do not touch, to be as in eager?

    def __str__(self) -> str:
        return self.name


def as_call(given: Any) -> Call:
    """Arguments from what a case's function gives: a tensor, a tuple, a dict, or a pair of both."""
    if isinstance(given, dict):
        return (), given
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], tuple) and isinstance(given[1], dict):
        return given
    return (given if isinstance(given, tuple) else (given,)), {}


@dataclass(frozen=True)
class Cases:
    """Collects the hazards of one file, in order."""

    of: str
    cases: list[Case]

    def __call__(
        self,
        call: Callable[[Data], Any],
        own: Callable[[], dict[str, Any]] = dict,
        *,
        recorded: bool | None = None,
        between: Callable[[nn.Module, int], None] = lambda _m, _turn: None,
        outside: Callable[[nn.Module], Any] = lambda _m: None,
        misuse: bool = False,
        advanced: bool = False,
        strides: bool = True,
        attributes: bool = True,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorates a function of (module, ...); or a class of modules, or a maker of one, taking nothing."""

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            made = isinstance(function, type) or getattr(function, "makes_module", False)
            self.cases.append(
                Case(
                    name=f"{self.of}-{function.__name__}",
                    make=function if made else lambda: Apply(function, own()),
                    call=lambda data: as_call(call(data)),
                    recorded=recorded,
                    between=between,
                    outside=outside,
                    misuse=misuse,
                    advanced=advanced,
                    strides=strides,
                    attributes=attributes,
                )
            )
            return function

        return add


def maker(function: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Marks a function that makes the module, and is not its forward."""
    function.makes_module = True  # type: ignore[attr-defined]
    return function
