"""`exported:FILE.pt2`: a program that torch.export.save wrote."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export.passes import move_to_device_pass

from nimble_jobs.errors import ModelError, OutOfMemory
from nimble_jobs.models.call_arguments import TAKES
from nimble_jobs.models.identity import opened
from nimble_jobs.models.permission import check_exported
from nimble_jobs.models.source import weights_file
from nimble_jobs.models.weights import load_weights
from nimble_jobs.spec.model import ModelSpec

_SIZES = "sizes_exported_with"  # an attribute of programs: the least and largest size of each axis of each input
_TRACED = 2  # the least that torch assumes of a free size while it traces

_log = logging.getLogger(__name__)


def build(file: Path, spec: ModelSpec, dtype: torch.dtype, device: str, folders: Sequence[Path]) -> nn.Module:
    """The program as a module. It keeps the mode, the dtype and the fixed input shapes that it was exported with.

    A file that holds more than tensors and known operators runs as code, so it must lie in an allowed folder. Raises
    ModelError, also if the spec asks for another dtype or has arguments.
    """
    if spec.args:
        raise ModelError(f"model.args.{min(spec.args)}: an exported program takes no arguments")
    with opened(file) as archive:
        check_exported(file, archive, folders)
        archive.seek(0)
        program = _loaded(file, archive)
    own = _dtype_of(program)
    if own is not None and own != dtype:
        raise ModelError(f"model.dtype: {file} was exported in {own}; it cannot run in {dtype}")
    _log.info("%s: exported with inputs %s", file, ", ".join(_inputs(program)))
    try:
        if torch.device(device).type != "cpu":
            program = move_to_device_pass(program, device)
        module = program.module()
    except torch.OutOfMemoryError as e:
        raise OutOfMemory(f"{file} does not fit on {device}: {e}") from e
    weights = weights_file(spec)
    if weights is not None:
        load_weights(module, weights)
    module.__dict__[TAKES] = _takes(program)
    shapes = [value.shape for value in _placeholders(program) if isinstance(value, torch.Tensor)]
    module.__dict__[_SIZES] = [[_bounds(size, program) for size in shape] for shape in shapes]
    return _without_modes(module, file)


def check_sizes(
    module: nn.Module, source: str, batch_size: int, shape: Sequence[int] | None, *, texts: bool = False
) -> None:
    """Raises ModelError for a program that was exported with other sizes than a batch has, or than records of its only
    input have, if their `shape` is given. Other modules take any. Batches of `texts` have a size for each length.
    """
    sizes = getattr(module, _SIZES, [])
    for rows, *_ in filter(None, sizes):
        if not _within(batch_size, rows):
            said, free = _said(rows), "export with a free first size (torch.export.Dim)"
            found = f"input.batch_size is {batch_size}; set it to {said}, or {free}"
            if texts:
                found = f"batches of texts have other sizes, such as {batch_size}; {free}"
            raise ModelError(f"model.source: {source} was exported with batches of {said}, and {found}")
    if shape is not None and len(sizes) == 1 and sizes[0]:
        _, *axes = sizes[0]
        if len(axes) != len(shape) or not all(map(_within, shape, axes)):
            wanted = ", ".join(_said(bounds) for bounds in axes)
            raise ModelError(
                f"model.source: {source} was exported with records of shape [{wanted}], and those of the input have "
                f"{list(shape)}"
            )


def _within(size: int, bounds: tuple[int, int | None]) -> bool:
    least, largest = bounds
    return least <= size and (largest is None or size <= largest)


def _said(bounds: tuple[int, int | None]) -> str:
    least, largest = bounds
    if largest is None:
        return f"at least {least}"
    return str(least) if least == largest else f"{least} to {largest}"


def _bounds(size: Any, program: torch.export.ExportedProgram) -> tuple[int, int | None]:
    """The least and the largest value of a size; None for none."""
    if isinstance(size, int):
        return size, size
    known = program.range_constraints.get(size.node.expr)
    if known is None:
        return 0, None
    # torch lets a free size be 0 or 1 unless its least is above 2: it traces with 2 or more, whatever was asked for.
    return int(known.lower) if known.lower > _TRACED else 0, int(known.upper) if known.upper <= sys.maxsize else None


def _loaded(file: Path, opened: Any) -> torch.export.ExportedProgram:
    try:
        with warnings.catch_warnings():
            # torch reads weights into buffers and then warns that they are read-only; the program owns them.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.export.load(opened)
    except torch.OutOfMemoryError as e:
        raise OutOfMemory(f"{file}: not enough memory to load it: {e}") from e
    except Exception as e:  # a damaged archive can raise anything
        reason = str(e).strip().split("\n", 1)[0]
        raise ModelError(f"{file}: cannot be loaded by torch {torch.__version__}: {type(e).__name__}: {reason}") from e


def _dtype_of(program: torch.export.ExportedProgram) -> torch.dtype | None:
    """Floating type of the parameters, else of the inputs; None without either."""
    values = [*program.state_dict.values(), *_placeholders(program)]
    return next((t.dtype for t in values if isinstance(t, torch.Tensor) and t.is_floating_point()), None)


def _placeholders(program: torch.export.ExportedProgram) -> list[Any]:
    inputs = set(program.graph_signature.user_inputs)
    return [n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder" and n.name in inputs]


def _inputs(program: torch.export.ExportedProgram) -> list[str]:
    return [f"{list(t.shape)} {t.dtype}" if isinstance(t, torch.Tensor) else repr(t) for t in _placeholders(program)]


def _takes(program: torch.export.ExportedProgram) -> tuple[Any, dict[str, Any]]:
    """The arguments that the program was exported with, nested as they were, with the dtype of each as its leaves."""
    kinds = [t.dtype if isinstance(t, torch.Tensor) else None for t in _placeholders(program)]
    nesting = program.call_spec.in_spec
    assert nesting is not None
    positional, named = nesting.unflatten(kinds)
    return positional, named


def _without_modes(module: nn.Module, file: Path) -> nn.Module:
    """Let eval() do nothing, since exported modules refuse it although they are used for evaluation."""

    def train(mode: bool = True) -> nn.Module:
        if mode:
            raise ModelError(f"{file}: an exported program cannot be trained")
        return module

    for part in module.modules():
        part.training = False
    module.__dict__["train"] = train
    module.__dict__["eval"] = lambda: module
    return module
