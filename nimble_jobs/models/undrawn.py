"""Builds modules without random weights, where all of them are loaded afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar, Token
from typing import Any, Self

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_DRAWS = {
    nn.init.uniform_,
    nn.init.normal_,
    nn.init.kaiming_uniform_,
    Tensor.uniform_,
    Tensor.normal_,
    Tensor.erfinv_,  # of a truncated normal distribution
}
_STEPS = {Tensor.mul_, Tensor.add_, Tensor.clamp_}  # steps of a truncated normal distribution, after the draw
_active = ContextVar("undrawn", default=False)


def undrawn() -> bool:
    """Whether modules that are built now get uninitialised parameters."""
    return _active.get()


class Undrawn(TorchFunctionMode):
    """Skips drawing random numbers for parameters, which takes most of the time of building a module.

    Such a parameter holds anything, so arithmetic that follows at once, as of a truncated normal distribution, is
    skipped, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before: list[Token[bool]] = []
        self._last: Tensor | None = None  # whose numbers were not drawn, if nothing else has been done since

    def __enter__(self) -> Self:
        self._before.append(_active.set(True))
        super().__enter__()  # type: ignore[no-untyped-call]  # torch does not say
        return self

    def __exit__(self, *given: Any) -> None:
        super().__exit__(*given)  # type: ignore[no-untyped-call]  # torch does not say
        _active.reset(self._before.pop())

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        target = args[0] if args else named.get("tensor")
        if isinstance(target, nn.Parameter) and (func in _DRAWS or (func in _STEPS and target is self._last)):
            self._last = target
            return target
        self._last = None
        return func(*args, **named)
