"""From a spec and its data to a module on its device, and a training step that can be prepared."""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from nimble_jobs.data import BadRecord, Batch, Reader
from nimble_jobs.engine.device import able, synchronize
from nimble_jobs.engine.private.modules import WithStatistics
from nimble_jobs.engine.record import flatten_outputs
from nimble_jobs.engine.step import differentiate
from nimble_jobs.errors import DataError, ModelError
from nimble_jobs.models.build import DTYPES, build
from nimble_jobs.models.from_python import explained
from nimble_jobs.planner.jobs.origin import noted
from nimble_jobs.planner.keys.options import options_of
from nimble_jobs.planner.keys.step import code_parts, step_parts
from nimble_jobs.planner.keys.switches import VARIES, as_in_training
from nimble_jobs.planner.lookup.obtain import check_unchanged
from nimble_jobs.planner.module.limits import Limits, find_limits
from nimble_jobs.planner.module.restoring import restoring_state
from nimble_jobs.planner.step.eager import Objective
from nimble_jobs.planner.step.request import OptimizerRecipe, Ranks, StepRequest
from nimble_jobs.spec import JobSpec, ModelSpec, OptimizerSpec, TrainSpec, parse_source
from nimble_jobs.workloads.heads import logits_of
from nimble_jobs.workloads.training.batches.epochs import Sampler
from nimble_jobs.workloads.training.batches.lots import Checks
from nimble_jobs.workloads.training.step.losses import loss_name, make_loss, takes_names

TRIALS = 8  # steps after which a layer that is skipped half of the time has been used, but for 1 of 256 cases
_NORMS = (WithStatistics, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True, kw_only=True)
class Shaped:
    """What one step is for batches of one shape more: texts of another bucket."""

    request: StepRequest
    parts: Mapping[str, str]  # of its key
    tokens: int  # of the bucket
    batches: int  # of this shape in the whole training


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A module on its device, in training mode, and what one step of it is."""

    spec: JobSpec
    module: nn.Module
    request: StepRequest
    classes: int | None  # None: labels are not classes
    code: Mapping[str, str]  # of model and loss, as it was before it ran
    parts: Mapping[str, str]  # of the step's key
    limits: Limits  # of whole numbers in the input
    further: tuple[Shaped, ...] = ()  # batches of other shapes, over the same weights and optimizer state
    names: tuple[str, ...] = ()  # of the classes of texts
    head: str | None = None  # what is to be said of a classifier's head
    tokens: int | None = None  # of the request's bucket
    batches: int = 0  # in the whole training; of texts, those in this bucket

    @property
    def each(self) -> tuple[Setup, ...]:
        """The same for each shape, as if it were the only one."""
        others = [
            replace(self, request=one.request, parts=one.parts, tokens=one.tokens, batches=one.batches, further=())
            for one in self.further
        ]
        return (replace(self, further=()), *others)

    @property
    def device(self) -> torch.device:
        return self.request.x.device

    def check_code(self) -> None:
        """Check that the code that ran is the code that the key names. Raises ModelChanged."""
        assert self.spec.train is not None
        check_unchanged(self.code, code_parts(self.spec.model, self.spec.train))

    @property
    def checks(self) -> Checks:
        """What records must be. A label that cross_entropy has no class for would end the process on a device."""
        bounded = self.request.loss_name.startswith("cross_entropy")
        return Checks(classes=self.classes if bounded else None, limits=self.limits)


def prepare(spec: JobSpec, reader: Reader, device: torch.device, allowed_python: Sequence[Path]) -> Setup:
    """Build and freeze the module, and call it once with an example.

    Raises ModelError, DataError, OutOfMemory, ModelChanged.
    """
    assert spec.train is not None
    train = spec.train
    code = code_parts(spec.model, train)
    model = begins_with(spec).model_copy(update={"dtype": "fp32"})
    with noted(model):
        module = build(model, device=str(device), allowed_python=allowed_python)
    freeze(module, train.freeze)
    ranks = ranks_of(spec)
    first = first_batch(reader, batch_size_of(spec))
    x, y = example(first, min(batch_size_of(spec), reader.total), device)
    limits = Limits()
    if x.dtype is torch.int64:
        limits = find_limits(module, x.shape, device)
        Checks(limits=limits).numbers(first, reader)  # before the model sees them
    classes = _classes(module, x, y, train, spec.model.dtype)
    in_training(module)
    request = StepRequest(
        module=module,
        x=x,
        y=y,
        loss=make_loss(train, allowed_python),
        loss_name=loss_name(train),
        optimizer=recipe(module, train.optimizer),
        clip_norm=train.clip_norm,
        precision=spec.model.dtype,
        accumulate=train.accumulate,
        options=options_of(spec.schedule),
        tolerance=spec.schedule.tolerance,
        ranks=ranks,
    )
    parts = step_parts(code, train, spec.schedule, x, y, device) | rank_parts(ranks)
    setup = Setup(
        spec=spec,
        module=module,
        request=request,
        classes=classes,
        code=code,
        parts=parts,
        limits=limits,
        batches=train.epochs * Sampler.of(spec, reader.total).batches,
    )
    setup.checks.labels(first, reader)
    _try_loss(train, request)
    setup.check_code()
    return setup


def ranks_of(spec: JobSpec) -> Ranks | None:
    """The ranks that a spec asks for; None for one device."""
    return Ranks(count=spec.run.gpus) if isinstance(spec.run.gpus, int) and spec.run.gpus > 1 else None


def batch_size_of(spec: JobSpec) -> int:
    """Records of a whole batch that one rank trains on."""
    ranks = ranks_of(spec)
    return spec.input.batch_size if ranks is None else spec.input.batch_size // ranks.count


@contextmanager
def cores_shared(spec: JobSpec, device: torch.device) -> Iterator[None]:
    """Inside, a rank on a CPU computes with its share of this process's threads."""
    ranks, threads = ranks_of(spec), torch.get_num_threads()
    if ranks is None or able(device).separate_memory:
        yield
        return
    torch.set_num_threads(max(1, threads // ranks.count))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def rank_parts(ranks: Ranks | None) -> dict[str, str]:
    """The key parts of a step that sums over ranks."""
    if ranks is None:
        return {}
    return {"train.ranks": str(ranks.count), "train.ranks.bucket_bytes": str(ranks.bucket_bytes)}


def begins_with(spec: JobSpec) -> ModelSpec:
    """The model with the weights that a new training begins with."""
    assert spec.train is not None
    given = spec.train.init_from
    return spec.model if given is None else spec.model.model_copy(update={"weights": given})


def freeze(module: nn.Module, globs: Sequence[str]) -> None:
    """Freeze the parameters whose names match one of `globs`.

    Raises ModelError for a glob that matches no name, with similar names, and if nothing is left to train.
    """
    parameters = dict(module.named_parameters())
    for index, glob in enumerate(globs):
        matching = [name for name in parameters if fnmatchcase(name, glob)]
        if not matching:
            near = difflib.get_close_matches(glob, parameters, 3, cutoff=0.0)
            raise ModelError(
                f"train.freeze[{index}]: {glob!r} matches no parameter of the model; similar names: {', '.join(near)}"
            )
        for name in matching:
            parameters[name].requires_grad_(False)
    if not any(p.requires_grad for p in parameters.values()):
        raise ModelError("train.freeze: every parameter of the model is frozen; expected at least one to train")


def in_training(module: nn.Module) -> None:
    """Switch to training mode. A norm whose parameters are all frozen stays as it is, and so do its statistics."""
    module.train()
    for part in module.modules():
        own = list(part.parameters(recurse=False))
        if isinstance(part, WithStatistics) and own and not any(p.requires_grad for p in own):
            part.eval()


def recipe(module: nn.Module, spec: OptimizerSpec) -> OptimizerRecipe:
    """The spec's optimizer. With `no_decay_on_norms`, norms, biases and one-dimensional parameters do not decay."""
    groups: tuple[tuple[tuple[str, ...], float], ...] = ()
    if spec.no_decay_on_norms:
        norms = {id(p) for part in module.modules() if isinstance(part, _NORMS) for p in part.parameters()}
        named = module.named_parameters()
        groups = ((tuple(n for n, p in named if p.dim() < 2 or id(p) in norms or n.rpartition(".")[2] == "bias"), 0.0),)
    return OptimizerRecipe(
        name=spec.name,
        momentum=spec.momentum,
        nesterov=spec.nesterov,
        betas=spec.betas,
        eps=spec.eps,
        weight_decay=spec.weight_decay,
        groups=groups,
    )


def first_batch(reader: Reader, batch_size: int, field: str = "input.source", use: str = "train on") -> Batch:
    """The first batch with a good record. Raises DataError, naming `field` and the records' `use`, if there is none."""
    bad: BadRecord | None = None
    for batch in reader.batches(batch_size=min(batch_size, reader.total)):
        bad = bad or next(iter(batch.bad), None)
        if len(batch) and batch.labels is not None:
            return batch
    why = f", the first is {bad.id}: {bad.reason}" if bad is not None else ""
    raise DataError(f"{field}: no good record to {use}{why}; expected at least one")


def example(batch: Batch, batch_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A whole batch of the records of `first_batch`, repeated if they are too few."""
    assert batch.labels is not None
    rows = np.arange(batch_size) % len(batch)
    return torch.from_numpy(batch.x[rows]).to(device), torch.from_numpy(batch.labels[rows]).to(device)


def autocast(dtype: str, device: torch.device) -> AbstractContextManager[object]:
    """What the spec's dtype means for operators: mixed precision, unless it is fp32."""
    return nullcontext() if dtype == "fp32" else torch.autocast(device.type, dtype=DTYPES[dtype])


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode without gradients; afterwards each part is in its own mode again."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part in training:
            part.training = True


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What steps in eager have shown."""

    varying: tuple[str, ...]  # operators whose results may differ from run to run, so that no resume is exact
    untrained: tuple[str, ...]  # parameters that got no gradient in any of `TRIALS` steps


def try_step(request: StepRequest) -> Tried:
    """Run the step in eager, forward and backward; everything is restored afterwards. Torch knows which operators vary
    on its device. A step may skip layers, by chance or in turn, so it is run up to `TRIALS` times if parameters got no
    gradient.
    """
    device = request.x.device
    objective, untrained = Objective(request, device), set(request.parameters)
    with (
        as_in_training(device),
        restoring_state(objective, device),
        torch.enable_grad(),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for _ in range(TRIALS):
            loss, _ = objective(request.x, request.y)
            one = {"loss": torch.ones_like(loss)}
            untrained -= differentiate({"loss": loss}, request.parameters, one, accumulate=True).keys()
            if not untrained:
                break
    matches = [re.match(VARIES, str(warning.message)) for warning in caught]
    return Tried(
        varying=tuple(sorted({match[1] for match in matches if match is not None})),
        untrained=tuple(name for name in request.parameters if name in untrained),
    )


def _try_loss(train: TrainSpec, request: StepRequest) -> None:
    """Call a loss of the user's own once, with the model's outputs for the example; everything is restored afterwards.

    Raises ModelError if it returns anything but a zero-dimensional floating tensor that requires grad. If its code
    fails, the error names file and line.
    """
    if takes_names(train.loss):
        return
    file, device = Path(parse_source(train.loss).target).resolve(), request.x.device
    trial = restoring_state(Objective(request, device), device)
    with trial, torch.enable_grad(), autocast(request.precision, device):
        outputs = request.module(request.x)
        with explained(file, "train.loss"):
            loss: Any = request.loss(outputs, request.y)
            synchronize(device)
    if not isinstance(loss, torch.Tensor):
        what = f"a {type(loss).__name__}"
    elif loss.dim() or not loss.is_floating_point() or not loss.requires_grad:
        grad = "requires" if loss.requires_grad else "does not require"
        what = f"a tensor of shape {list(loss.shape)}, {loss.dtype}, that {grad} grad"
    else:
        return
    raise ModelError(
        f"train.loss: {file} returned {what}; expected the mean loss, a zero-dimensional floating tensor that "
        "requires grad"
    )


def _classes(module: nn.Module, x: torch.Tensor, y: torch.Tensor, train: TrainSpec, dtype: str) -> int | None:
    """How many classes the model has; None if labels or outputs are not classes. Raises ModelError."""
    if y.is_floating_point():
        return None
    with restoring_state(module, x.device), evaluating(module), autocast(dtype, x.device):
        outputs = flatten_outputs(module(x))
    try:
        return logits_of(outputs, "train.loss: cross_entropy needs", "").shape[1]
    except ModelError:
        if train.loss == "cross_entropy":
            raise
        return None
