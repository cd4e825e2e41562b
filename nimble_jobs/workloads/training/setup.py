"""From a spec and its data to a module and a training step that are ready to run."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from nimble_jobs.data import BadRecord, Batch, Reader
from nimble_jobs.engine.record import flatten_outputs
from nimble_jobs.errors import DataError, ModelError
from nimble_jobs.models.build import DTYPES, build
from nimble_jobs.planner.keys.step import code_parts, step_options, step_parts
from nimble_jobs.planner.lookup.obtain import check_unchanged
from nimble_jobs.planner.module.limits import Limits, find_limits
from nimble_jobs.planner.module.restoring import no_traces
from nimble_jobs.planner.step.request import OptimizerRecipe, StepRequest
from nimble_jobs.spec import JobSpec, ModelSpec, OptimizerSpec, TrainSpec
from nimble_jobs.workloads.heads import logits_of
from nimble_jobs.workloads.training.losses import make_loss, try_loss
from nimble_jobs.workloads.training.reading import TRAINED_ON, check_labels, check_numbers, record_name

_MOVING = (nn.modules.batchnorm._NormBase,)  # norms with statistics that training moves
_NORMS = (*_MOVING, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A module on its device, in training mode, and what one step of it is."""

    module: nn.Module
    request: StepRequest
    classes: int | None  # None where labels are no classes
    code: Mapping[str, str]  # of model and loss, before it ran
    parts: Mapping[str, str]  # of the step's key
    limits: Limits = Limits()  # noqa: RUF009  # of whole numbers in the input

    def check_code(self, spec: JobSpec) -> None:
        """What ran must be what the key names. Raises ModelChanged."""
        assert spec.train is not None
        check_unchanged(self.code, code_parts(spec.model, spec.train))

    @property
    def label_limit(self) -> int | None:
        """What every label must be below: cross_entropy on a device ends the process over others."""
        return self.classes if self.request.loss_name.startswith("cross_entropy") else None


def prepare(spec: JobSpec, reader: Reader, device: torch.device, allowed_python: Sequence[Path]) -> Setup:
    """Build, freeze, and look once at what the model makes of a batch.

    Raises ModelError, DataError, OutOfMemory, ModelChanged.
    """
    assert spec.train is not None
    train = spec.train
    code = code_parts(spec.model, train)
    model = begins_with(spec).model_copy(update={"dtype": "fp32"})
    module = build(model, device=str(device), allowed_python=allowed_python)
    freeze(module, train.freeze)
    first = first_batch(reader, spec.input.batch_size)
    x, y = example(first, min(spec.input.batch_size, reader.total), device)
    limits = Limits()
    if x.dtype is torch.int64:  # before the first batch is given to the model
        limits = find_limits(module, x.shape, device)
        check_numbers(first, reader, limits, TRAINED_ON)
    classes = _classes(module, x, y, train, spec.model.dtype)
    in_training(module)
    request = StepRequest(
        module=module,
        x=x,
        y=y,
        loss=make_loss(train, allowed_python),
        loss_name=f"{train.loss}, label smoothing {train.label_smoothing:g}" if train.label_smoothing else train.loss,
        optimizer=recipe(module, train.optimizer),
        clip_norm=train.clip_norm,
        precision=spec.model.dtype,
        accumulate=train.accumulate,
        options=step_options(spec.schedule),
        tolerance=spec.schedule.tolerance,
    )
    parts = step_parts(code, train, spec.schedule, x, y, device)
    ready = Setup(module=module, request=request, classes=classes, code=code, parts=parts, limits=limits)
    if ready.label_limit is not None:
        assert first.labels is not None
        check_labels(first.labels, ready.label_limit, named=partial(record_name, first, reader))
    try_loss(train, request, device)
    ready.check_code(spec)
    return ready


def begins_with(spec: JobSpec) -> ModelSpec:
    """The model with the weights that a new training begins with."""
    assert spec.train is not None
    given = spec.train.init_from
    return spec.model if given is None else spec.model.model_copy(update={"weights": given})


def freeze(module: nn.Module, globs: Sequence[str]) -> None:
    """Have the parameters whose names match stay as they are.

    Raises ModelError for a glob that matches none, with names that are near, and where nothing is left to train.
    """
    parameters = dict(module.named_parameters())
    for index, glob in enumerate(globs):
        matching = [name for name in parameters if fnmatchcase(name, glob)]
        if not matching:
            near = difflib.get_close_matches(glob, parameters, 3, cutoff=0.0)
            raise ModelError(
                f"train.freeze[{index}]: {glob!r} matches no parameter of the model; names near it: {', '.join(near)}"
            )
        for name in matching:
            parameters[name].requires_grad_(False)
    if not any(p.requires_grad for p in parameters.values()):
        raise ModelError("train.freeze: every parameter of the model is frozen; expected something left to train")


def in_training(module: nn.Module) -> None:
    """Training mode, except for norms all of whose parameters are frozen: their statistics stay as they are too."""
    module.train()
    for part in module.modules():
        own = list(part.parameters(recurse=False))
        if isinstance(part, _MOVING) and own and not any(p.requires_grad for p in own):
            part.eval()


def recipe(module: nn.Module, spec: OptimizerSpec) -> OptimizerRecipe:
    """The spec's optimizer. `no_decay_on_norms` leaves norms, biases and what has one dimension without decay."""
    groups: tuple[tuple[tuple[str, ...], float], ...] = ()
    if spec.no_decay_on_norms:
        norms = {id(p) for part in module.modules() if isinstance(part, _NORMS) for p in part.parameters()}
        named = module.named_parameters()
        groups = ((tuple(n for n, p in named if p.dim() < 2 or id(p) in norms or _is_bias(n)), 0.0),)
    return OptimizerRecipe(
        name=spec.name,
        momentum=spec.momentum,
        nesterov=spec.nesterov,
        betas=spec.betas,
        eps=spec.eps,
        weight_decay=spec.weight_decay,
        groups=groups,
    )


def _is_bias(name: str) -> bool:
    return name.rpartition(".")[2] == "bias"


def first_batch(reader: Reader, batch_size: int) -> Batch:
    """The first batch that holds good records. Raises DataError where there is none."""
    bad: BadRecord | None = None
    for batch in reader.batches(batch_size=min(batch_size, reader.total)):
        bad = bad or next(iter(batch.bad), None)
        if len(batch) and batch.labels is not None:
            return batch
    why = f", the first is {bad.id}: {bad.reason}" if bad is not None else ""
    raise DataError(f"input.source: no good record to train on{why}; expected at least one")


def example(batch: Batch, batch_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A whole batch of the records of `first_batch`, repeated where they are too few."""
    assert batch.labels is not None
    rows = np.arange(batch_size) % len(batch)
    return torch.from_numpy(batch.x[rows]).to(device), torch.from_numpy(batch.labels[rows]).to(device)


def autocast(dtype: str, device: torch.device) -> AbstractContextManager[object]:
    """What the spec's dtype means for operators: mixed precision, unless it is fp32."""
    return nullcontext() if dtype == "fp32" else torch.autocast(device.type, dtype=DTYPES[dtype])


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients; afterwards each part is in its own mode again."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part in training:
            part.training = True


def _classes(module: nn.Module, x: torch.Tensor, y: torch.Tensor, train: TrainSpec, dtype: str) -> int | None:
    if y.is_floating_point():
        return None
    with no_traces(module, x.device), evaluating(module), autocast(dtype, x.device):
        outputs = flatten_outputs(module(x))
    try:
        return logits_of(outputs).shape[1]
    except ModelError:
        if train.loss != "cross_entropy":
            return None
        shapes = ", ".join(f"{n} {list(t.shape)}" for n, t in outputs.items())
        raise ModelError(
            f"train.loss: cross_entropy needs scores [batch, classes]; the model returns {shapes}"
        ) from None
