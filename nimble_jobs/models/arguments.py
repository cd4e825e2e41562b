"""Calling a model's builder with the arguments of a spec, and saying which of them it refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nimble_jobs.errors import ModelError, OutOfMemory

_UNKNOWN = re.compile(r"unexpected keyword argument '(\w+)'")
_ABSENT = re.compile(r"missing \d+ required .*?arguments?: (.+)$")


def called(builder: Callable[..., nn.Module], chosen: dict[str, Any], what: str, given: dict[str, Any]) -> nn.Module:
    """`builder(**chosen)`. Raises ModelError naming the argument of `given`, the user's, that it refuses."""
    try:
        return builder(**chosen)
    except torch.OutOfMemoryError as e:
        raise OutOfMemory(f"{what}: not enough memory to build the model: {e}") from e
    except Exception as e:  # whatever a library raises for a bad argument
        raise ModelError(_explain(e, what, given)) from e


def _explain(e: Exception, what: str, given: dict[str, Any]) -> str:
    if isinstance(e, TypeError) and (m := _UNKNOWN.search(str(e))) and m[1] in given:
        return f"model.args.{m[1]}: {what} takes no such argument"
    if isinstance(e, TypeError) and (m := _ABSENT.search(str(e))):
        return f"model.args: {what} needs {m[1]}"
    named = [key for key in given if re.search(rf"\b{re.escape(key)}\b", str(e))]
    field = f"model.args.{named[0]}" if named else "model.args"
    shown = ", ".join(f"{key}={value!r}" for key, value in given.items()) or "no arguments"
    return f"{field}: {what} cannot be built with {shown}: {type(e).__name__}: {e}"
