"""Contradictions between the fields of a training's spec."""

from __future__ import annotations

from collections.abc import Iterator

from nimble_jobs.spec.findings import Finding, Rule, register
from nimble_jobs.spec.formats import SUFFIXES, TEXTS, either
from nimble_jobs.spec.model import JobSpec
from nimble_jobs.spec.paths import WEIGHTS_SUFFIXES
from nimble_jobs.spec.training import TrainSpec

RULES: list[Rule] = []
rule = register(RULES)


@rule("kind", "train")
def _kind(spec: JobSpec) -> Iterator[Finding]:
    if spec.kind == "score" and spec.train is not None:
        yield Finding("train", "not allowed if kind is score", "kind: finetune, or no train")
    if spec.kind == "finetune" and spec.train is None:
        yield Finding("train", "missing", "a mapping, because kind is finetune", at="kind")


@rule("kind", "output")
def _finetune_output(spec: JobSpec) -> Iterator[Finding]:
    if spec.kind == "finetune":
        for name in ("format", "fields", "shard_size"):
            if name in spec.output.model_fields_set:
                yield Finding(f"output.{name}", "not allowed if kind is finetune", f"kind: score, or no {name}")


@rule("kind", "input.batch_size")
def _batch_size(spec: JobSpec) -> Iterator[Finding]:
    if spec.kind == "finetune" and spec.input.batch_size < 2:
        problem = f"found {spec.input.batch_size}, but kind is finetune"
        yield Finding("input.batch_size", problem, "2 or more, because batch statistics need two records")


@rule("kind", "input.fields.label", "input.format")
def _labels(spec: JobSpec) -> Iterator[Finding]:
    if spec.kind != "finetune":
        return
    if spec.input.format == "npy":
        expected = either(name for name in SUFFIXES if name not in ("npy", *TEXTS))
        yield Finding("input.format", "npy holds no labels", f"{expected} if kind is finetune")
    elif spec.input.fields.label is None:
        parent = spec.input.format == "images"
        expected = "parent, the folder of each image" if parent else "the array or column of labels"
        yield Finding("input.fields.label", "missing", f"{expected}, because kind is finetune")


@rule("model.weights", "train.init_from")
def _two_weights(spec: JobSpec) -> Iterator[Finding]:
    if spec.model.weights is not None and spec.train and spec.train.init_from is not None:
        yield Finding("train.init_from", "not allowed together with model.weights", "one of them")


@rule("train.resume", "train.init_from")
def _resume(spec: JobSpec) -> Iterator[Finding]:
    if spec.train is None or spec.train.resume in ("auto", "never"):
        return
    if spec.train.resume.endswith(WEIGHTS_SUFFIXES):
        expected = "the folder of a checkpoint, or train.init_from to start a new training from these weights"
        yield Finding("train.resume", f"found the weights file {spec.train.resume}", expected)
    elif spec.train.init_from is not None:
        expected = "resume, to continue a training, or init_from, to start a new one"
        yield Finding("train.resume", "names a checkpoint, but train.init_from is given too", expected)


@rule("kind", "schedule.in_flight")
def _in_flight(spec: JobSpec) -> Iterator[Finding]:
    if spec.kind == "finetune" and spec.schedule.in_flight not in ("auto", 1):
        expected = "auto or 1, because each training step needs the one before it"
        yield Finding("schedule.in_flight", "more than 1", expected)


_OF_ADAM, _OF_SGD = ("betas", "eps"), ("momentum", "nesterov")


@rule(*(f"train.optimizer.{name}" for name in ("name", "weight_decay", "no_decay_on_norms", *_OF_ADAM, *_OF_SGD)))
def _optimizer(spec: JobSpec) -> Iterator[Finding]:
    if spec.train is None:
        return
    optimizer = spec.train.optimizer
    others, expected = (_OF_ADAM, "adam or adamw") if optimizer.name == "sgd" else (_OF_SGD, "sgd")
    for name in others:
        if name in optimizer.model_fields_set:
            problem = f"not allowed if the optimizer is {optimizer.name}"
            yield Finding(f"train.optimizer.{name}", problem, f"{expected}, or no {name}")
    if optimizer.name == "sgd" and optimizer.nesterov and not optimizer.momentum:
        yield Finding("train.optimizer.nesterov", "true without momentum", "momentum above 0")
    if optimizer.no_decay_on_norms and not optimizer.weight_decay:
        yield Finding("train.optimizer.no_decay_on_norms", "true without weight_decay", "weight_decay above 0")


@rule("train.lr_schedule.name", "train.lr_schedule.warmup_steps")
def _lr_schedule(spec: JobSpec) -> Iterator[Finding]:
    if spec.train and spec.train.lr_schedule.name == "one_cycle" and spec.train.lr_schedule.warmup_steps:
        problem = "not allowed for one_cycle, which has its own warm-up"
        yield Finding("train.lr_schedule.warmup_steps", problem, "another schedule, or no warmup_steps")


@rule("train.loss", "train.label_smoothing", "input.format")
def _loss(spec: JobSpec) -> Iterator[Finding]:
    if spec.train is None:
        return
    if spec.train.label_smoothing and spec.train.loss != "cross_entropy":
        problem = f"not allowed if the loss is {spec.train.loss}"
        yield Finding("train.label_smoothing", problem, "cross_entropy, or no label_smoothing")
    if spec.train.loss in ("mse", "bce") and spec.input.format == "images":
        problem = f"{spec.train.loss} needs numbers, but the labels of images are folder names"
        yield Finding("train.loss", problem, "cross_entropy, or another input.format")


@rule("train.epochs", "train.validation.every_epochs")
def _validation(spec: JobSpec) -> Iterator[Finding]:
    if spec.train and spec.train.validation and spec.train.validation.every_epochs > spec.train.epochs:
        yield Finding("train.validation.every_epochs", "more than train.epochs", f"at most {spec.train.epochs}")


@rule("train.checkpoint.best", "train.validation", "train.loss")
def _best(spec: JobSpec) -> Iterator[Finding]:
    if spec.train and spec.train.checkpoint and spec.train.checkpoint.best:
        yield from _measured(spec.train, "train.checkpoint.best", spec.train.checkpoint.best)


@rule("train.early_stopping.metric", "train.validation", "train.loss")
def _stopping(spec: JobSpec) -> Iterator[Finding]:
    if spec.train and spec.train.early_stopping:
        yield from _measured(spec.train, "train.early_stopping.metric", spec.train.early_stopping.metric)


def _measured(train: TrainSpec, field: str, metric: str) -> Iterator[Finding]:
    if metric.startswith("val_") and train.validation is None:
        yield Finding(field, f"{metric} needs validation data", "train.validation, or another metric")
    if metric.endswith(("accuracy", "f1")) and train.loss in ("mse", "bce"):
        measure = "F1" if metric.endswith("f1") else "accuracy"
        expected = metric.replace("accuracy", "loss").replace("f1", "loss")
        yield Finding(field, f"{train.loss} has no {measure}", expected)


@rule("train.checkpoint.every_epochs", "train.epochs")
def _checkpoint(spec: JobSpec) -> Iterator[Finding]:
    if spec.train is None or spec.train.checkpoint is None:
        return
    epochs = spec.train.checkpoint.every_epochs
    if epochs is not None and epochs > spec.train.epochs:
        yield Finding("train.checkpoint.every_epochs", "more than train.epochs", f"at most {spec.train.epochs}")


@rule("train.early_stopping.patience", "train.early_stopping.metric", "train.epochs", "train.validation.every_epochs")
def _patience(spec: JobSpec) -> Iterator[Finding]:
    if spec.train is None or spec.train.early_stopping is None:
        return
    stopping, measured = spec.train.early_stopping, spec.train.epochs
    if stopping.metric.startswith("val_") and spec.train.validation is not None:
        measured //= spec.train.validation.every_epochs
    if stopping.patience >= measured:
        problem = f"{stopping.metric} is measured only {measured} times, so it never ends the training"
        yield Finding("train.early_stopping.patience", problem, f"less than {measured}")


@rule("train.augment.random_resized_crop", "train.augment.crop_padding", "input.format")
def _random_resized_crop(spec: JobSpec) -> Iterator[Finding]:
    if spec.train is None or spec.train.augment.random_resized_crop is None:
        return
    if spec.train.augment.crop_padding:
        expected = "random_resized_crop or crop_padding"
        yield Finding("train.augment.crop_padding", "not allowed together with random_resized_crop", expected)
    if spec.input.format == "csv":
        problem = "not allowed for csv, which holds no images"
        yield Finding("train.augment.random_resized_crop", problem, "another input.format, or no random_resized_crop")


@rule("train.freeze")
def _freeze(spec: JobSpec) -> Iterator[Finding]:
    names = spec.train.freeze if spec.train else ()
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Finding("train.freeze", f"{name} is given twice", "each glob once", index=index)
