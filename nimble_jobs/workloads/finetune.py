"""Fine-tune a model on labelled records: shuffled epochs, a learning-rate schedule, weights that a score job takes.

The training step runs in eager; the job says so. Sources: SGD with momentum and AdamW are torch's own; the cosine
schedule is that of Loshchilov and Hutter (SGDR, 2017) without restarts.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from nimble_jobs.data import BadRecord, Batch, Reader, Staging, open_reader
from nimble_jobs.engine import device as devices
from nimble_jobs.engine.record import flatten_outputs
from nimble_jobs.errors import DataError, JobFailed, OutOfMemory
from nimble_jobs.models.build import build
from nimble_jobs.models.weights import save_weights
from nimble_jobs.spec import TrainSpec
from nimble_jobs.spec.model import LrScheduleSpec, OptimizerSpec
from nimble_jobs.workloads.basis import basis
from nimble_jobs.workloads.columns import logits_of
from nimble_jobs.workloads.context import JobContext, Outcome, Stop
from nimble_jobs.workloads.score import already_published
from nimble_jobs.workloads.threshold import enforce_threshold

_EAGER = "training steps have no schedules yet"


@dataclass
class _Training:
    """One training run and its counts."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device
    steps: int  # in the whole training
    step: int = 0
    records: int = 0
    metrics: list[dict[str, Any]] = field(default_factory=list)


def run(context: JobContext) -> Outcome:
    """Train on `input` for `train.epochs` and publish `model.safetensors` and `metrics.jsonl`.

    An interrupted training starts again from its first step. Raises DataError, ModelError, OutputExists, OutOfMemory,
    and JobFailed for a loss that is not finite.
    """
    spec = context.spec
    assert spec.train is not None  # the spec's rules see to it
    device = devices.resolve(context.device)
    start = time.perf_counter()
    with open_reader(spec.input) as reader:
        if not reader.has_labels:
            raise DataError("input.fields.label: fine-tuning needs labels; the input has none")
        staging = Staging(spec.output, context.job.id, context.job.attempt, basis=basis(spec, reader))
        context.report(phase="load", total=reader.total * spec.train.epochs)
        if staging.finished is not None:
            return already_published(context, staging)
        training = _start(context, reader, device)
        load_s = time.perf_counter() - start
        schedule = {"key": None, "hit": "miss", "runs": "eager", "fallback": _EAGER, "device": devices.describe(device)}
        context.event("fallback", f"runs in eager: {_EAGER}", {})
        context.report(phase="run", schedule=schedule)
        try:
            stop = _train(context, reader, training)
        except torch.OutOfMemoryError as e:
            raise OutOfMemory(f"not enough memory on {device} for a training step: {e}") from e
        if stop is not Stop.GO:
            return Outcome(stop=stop, schedule=schedule)
    run_s = time.perf_counter() - start - load_s
    context.report(phase="publish", done=training.records)
    save_weights(training.module, staging.file("model.safetensors"))
    lines = "".join(json.dumps(m) + "\n" for m in training.metrics)
    staging.file("metrics.jsonl").write_text(lines, encoding="utf-8")
    timings = {
        "load_s": load_s,
        "run_s": run_s,
        "records_per_s": training.records / run_s,
        "steps_per_s": training.step / run_s,
    }
    outputs = staging.publish({"steps": training.step, "metrics": training.metrics[-1] if training.metrics else {}})
    return Outcome(outputs=outputs, timings=timings, schedule=schedule)


def _start(context: JobContext, reader: Reader, device: torch.device) -> _Training:
    spec = context.spec
    assert spec.train is not None
    model = spec.model
    if spec.train.init_from is not None:
        model = model.model_copy(update={"weights": spec.train.init_from})
    module = build(model, device=str(device), allowed_python=context.allowed_python)
    torch.manual_seed(spec.model.seed)  # dropout
    return _Training(
        module=module,
        optimizer=_optimizer(module, spec.train.optimizer),
        device=device,
        steps=spec.train.epochs * math.ceil(reader.total / spec.input.batch_size),
    )


def _train(context: JobContext, reader: Reader, training: _Training) -> Stop:
    spec = context.spec
    train = spec.train
    assert train is not None
    for epoch in range(1, train.epochs + 1):
        order = np.random.default_rng([spec.model.seed, epoch]).permutation(reader.total)
        training.module.train()
        seen, right, loss_sum = 0, 0, 0.0
        bad: list[BadRecord] = []
        for batch in reader.batches(batch_size=spec.input.batch_size, order=order):
            stop = context.stop()
            if stop is not Stop.GO:
                context.event("stopped", f"at step {training.step}; a later attempt starts again from step 0", {})
                return stop
            loss, correct = _step(training, batch, train)
            seen, right, loss_sum = seen + len(batch), right + correct, loss_sum + loss * len(batch)
            bad += batch.bad
            enforce_threshold(spec.run, len(bad), reader.total, bad)
            training.records += batch.stop - batch.start
            context.report(done=training.records, bad=len(bad))
        metrics = {
            "epoch": epoch,
            "step": training.step,
            "lr": training.optimizer.param_groups[0]["lr"],
            "loss": loss_sum / max(seen, 1),
            "accuracy": right / max(seen, 1),
        }
        if train.validation is not None and epoch % train.validation.every_epochs == 0:
            metrics |= _validate(context, training, reader)
        training.metrics.append(metrics)
        shown = ", ".join(f"{k} {v:.4g}" for k, v in metrics.items() if k not in ("epoch", "step"))
        context.event("epoch", f"{epoch} of {train.epochs}: {shown}", metrics)
    return Stop.GO


def _step(training: _Training, batch: Batch, train: TrainSpec) -> tuple[float, int]:
    """One step. A batch with fewer than two records is skipped: batch statistics need two."""
    if len(batch) < 2 or batch.labels is None:
        return 0.0, 0
    for group in training.optimizer.param_groups:
        group["lr"] = train.optimizer.lr * lr_factor(train.lr_schedule, training.step, training.steps)
    x = torch.from_numpy(np.ascontiguousarray(batch.x)).to(training.device)
    y = torch.from_numpy(batch.labels).to(training.device)
    logits = logits_of(flatten_outputs(training.module(x)))
    _check_labels(y, logits)
    loss = nn.functional.cross_entropy(logits, y)
    training.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    value = float(loss.detach())
    if not math.isfinite(value):
        raise JobFailed(
            f"the loss became {value} at step {training.step}; expected a finite number (a lower train.optimizer.lr?)"
        )
    training.optimizer.step()
    training.step += 1
    return value, int((logits.detach().argmax(1) == y).sum())


def _check_labels(y: torch.Tensor, logits: torch.Tensor) -> None:
    low, high, classes = int(y.min()), int(y.max()), logits.shape[1]
    if low < 0 or high >= classes:
        raise DataError(
            f"input.fields.label: found the label {low if low < 0 else high}; "
            f"expected 0 to {classes - 1}, as the model has {classes} classes"
        )


def lr_factor(schedule: LrScheduleSpec, step: int, steps: int) -> float:
    """Share of the base learning rate at `step` of `steps`: linear warm-up, then constant, cosine or linear to zero."""
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    progress = (step - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps)
    match schedule.name:
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        case "linear":
            return max(0.0, 1 - progress)
        case _:
            return 1.0


def _optimizer(module: nn.Module, spec: OptimizerSpec) -> torch.optim.Optimizer:
    trained = [p for p in module.parameters() if p.requires_grad]
    match spec.name:
        case "sgd":
            return torch.optim.SGD(
                trained, lr=spec.lr, momentum=spec.momentum, nesterov=spec.nesterov, weight_decay=spec.weight_decay
            )
        case "adam":
            return torch.optim.Adam(trained, lr=spec.lr, weight_decay=spec.weight_decay)
        case _:
            return torch.optim.AdamW(trained, lr=spec.lr, weight_decay=spec.weight_decay)


def _validate(context: JobContext, training: _Training, reader: Reader) -> dict[str, float]:
    spec = context.spec
    assert spec.train is not None
    assert spec.train.validation is not None
    held_out = spec.input.model_copy(update={"source": spec.train.validation.source})
    right, seen, loss_sum = 0, 0, 0.0
    training.module.eval()
    with torch.no_grad(), open_reader(held_out, label_names=reader.label_names) as source:
        for batch in source.batches(batch_size=spec.input.batch_size):
            if batch.labels is None or not len(batch):
                continue
            logits = logits_of(flatten_outputs(training.module(torch.from_numpy(batch.x).to(training.device))))
            y = torch.from_numpy(batch.labels).to(training.device)
            _check_labels(y, logits)
            loss_sum += float(nn.functional.cross_entropy(logits, y, reduction="sum"))
            right += int((logits.argmax(1) == y).sum())
            seen += len(batch)
    training.module.train()
    if not seen:
        raise DataError(f"{spec.train.validation.source}: no good record to validate on; expected at least one")
    return {"val_loss": loss_sum / seen, "val_accuracy": right / seen}
