"""Whether a model can take a batch, found on torch's meta device, which knows shapes only."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from nimble_jobs.data import Reader
from nimble_jobs.engine.record import flatten_outputs
from nimble_jobs.errors import ModelError, NimbleError, first_line
from nimble_jobs.models.build import shapes_only
from nimble_jobs.models.call_arguments import call_of, signature_of
from nimble_jobs.models.packed import Packed
from nimble_jobs.models.pooled import MASK
from nimble_jobs.models.source import source_of
from nimble_jobs.packing import Layout
from nimble_jobs.spec import JobSpec
from nimble_jobs.spec.formats import TEXTS
from nimble_jobs.spec.pooling_rules import leaves_out_head
from nimble_jobs.workloads.text.setup import TextSetup
from nimble_jobs.workloads.whole_numbers import OneType, refusal

_log = logging.getLogger(__name__)

# What a model's code raises if it meets None in place of an argument, or misses an entry of one.
_OF_ARGUMENTS = (AttributeError, KeyError, NameError, TypeError, ValueError, AssertionError)
_OF_META = re.compile(r"\bmeta\b(?!\.)|data-dependent")
_TOKENS = 8  # of the texts that are tried


@dataclass(frozen=True, kw_only=True)
class Tried:
    """How the call of a model went."""

    outputs: Mapping[str, torch.Tensor] | None = None
    problem: str | None = None
    unchecked: str | None = None  # why the call says nothing


@contextmanager
def explaining(
    spec: JobSpec, reader: Reader, setup: TextSetup | None, allowed_python: Sequence[Path]
) -> Iterator[None]:
    """While inside, an exception of a model with named inputs becomes a ModelError if the model says the same of any
    batch.

    `setup`: how the input's texts become tokens, if it has any. A `python:` model is not tried, as its code may keep
    what it makes, which on the meta device would have no values.
    """
    try:
        yield
    except NimbleError:
        raise
    except _OF_ARGUMENTS as e:
        problem = _problem(spec, reader, setup, allowed_python)
        if problem is None or first_line(e) not in problem:
            raise
        _log.info("the model's own error", exc_info=e)
        raise ModelError(problem) from e


def _problem(spec: JobSpec, reader: Reader, setup: TextSetup | None, allowed_python: Sequence[Path]) -> str | None:
    named = reader.packing is not None or spec.input.format in TEXTS
    if not named or source_of(spec.model).scheme in ("exported", "python"):
        return None
    model = spec.model if setup is None else setup.model(spec.model)
    try:
        module = shapes_only(model, allowed_python=allowed_python, headless=leaves_out_head(spec))
        return tried(spec, module, reader, setup).problem
    except Exception:  # noqa: BLE001  # the model is the user's and can raise anything; its first exception is told
        return None


def tried(spec: JobSpec, module: nn.Module, reader: Reader, setup: TextSetup | None = None) -> Tried:
    """Call a module on the meta device with a batch of the input. Raises ModelError if it has no such arguments.

    Texts are not tried without `setup`.
    """
    if spec.input.format not in TEXTS:
        return _tried(spec, module, reader, reader.packing)
    if setup is None:
        return Tried(unchecked="no tokenizer is known")
    layout = setup.layout(min(setup.limit, _TOKENS))
    call = _tried(spec, module, reader, layout)
    if call.unchecked is not None:  # models of transformers look at the mask's values, but need none
        unmasked = tuple(part for part in layout.parts if part.path != MASK)
        again = _tried(spec, module, reader, replace(layout, parts=unmasked))
        return call if again.outputs is None else again
    return call


def _tried(spec: JobSpec, module: nn.Module, reader: Reader, layout: Layout | None) -> Tried:
    floating = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    paths: list[str] = []
    if layout is None:
        called, shape, kind = module, reader.signature.shape, getattr(torch, reader.signature.dtype)
        if kind.is_floating_point:
            kind = floating
    else:
        paths = [part.path for part in layout.parts]
        called = Packed(module, layout, floating, torch.device("meta"), call_of(module, paths))
        shape, kind = (layout.nbytes,), torch.uint8
    x = torch.empty((spec.input.batch_size, *shape), dtype=kind, device="meta")
    try:
        with torch.no_grad(), torch.device("meta"), OneType():  # type: ignore[no-untyped-call]
            return Tried(outputs=flatten_outputs(called(x)))
    except NimbleError as e:
        return Tried(unchecked=str(e))
    except Exception as e:  # noqa: BLE001  # the model is the user's and can raise anything; the user is told
        if of_meta(e):
            return Tried(unchecked=f"the model needs values, not only shapes: {first_line(e)}")
        return _failed(spec, reader, e, _left_out(module, paths) if isinstance(e, _OF_ARGUMENTS) else "")


def _failed(spec: JobSpec, reader: Reader, error: Exception, left_out: str) -> Tried:
    why, size, signature = first_line(error), spec.input.batch_size, reader.signature
    if spec.input.format in TEXTS:
        if not left_out:  # it may be due to the length of the texts
            return Tried(unchecked=why)
        more = f"it also takes {left_out}, which input.format {spec.input.format} does not give"
        return Tried(problem=f"input.format: the model cannot take a batch of texts: {why}; {more}")
    batch = f"{signature.dtype} {[size, *signature.shape]}"
    if reader.packing is not None:
        batch = f"{size}: {reader.packing.text}"
    more = f"; the model also takes {left_out}, which input.fields.x does not map" if left_out else ""
    cannot = f"input.fields.x: the model cannot take a batch of {batch}: {why}{more}"
    return Tried(problem=refusal(spec, reader, error) or cannot)


def of_meta(error: BaseException) -> bool:
    """Whether the error is due to the meta device, which has no values."""
    text = f"{error} {error.__cause__ or ''}".lower()
    causes = (error, error.__cause__)
    return any(isinstance(e, NotImplementedError) for e in causes) or _OF_META.search(text) is not None


def _left_out(module: nn.Module, paths: Sequence[str]) -> str:
    """The arguments that are None because no path gives them; empty for a call without named arguments."""
    signature = signature_of(module)
    if signature is None or not paths:
        return ""
    first = list(dict.fromkeys(path.split(".")[0] for path in paths))
    given = {*first, *list(signature.parameters)[: sum(name.isdigit() for name in first)]}
    return ", ".join(p.name for p in signature.parameters.values() if p.default is None and p.name not in given)
