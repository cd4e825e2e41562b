"""The key of a training step: everything that its schedules depend on, told without building or recording anything."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping

import torch

from nimble_jobs.engine import device as devices
from nimble_jobs.engine import verify
from nimble_jobs.models import identity
from nimble_jobs.models.identity import python_identity
from nimble_jobs.planner.keys.files import LOSS
from nimble_jobs.planner.keys.options import option_parts, options_of
from nimble_jobs.planner.keys.request import schedule_key
from nimble_jobs.planner.keys.roles import Role
from nimble_jobs.schedule import FORMAT_VERSION, Schedule
from nimble_jobs.spec import ModelSpec, OptimizerSpec, ScheduleSpec, TrainSpec, parse_source

_PROGRAM = "train.program"
_OF_UPDATES = (
    "train.optimizer",
    "train.clip_norm",
    "train.accumulate",
    "train.ranks",
    "train.freeze",
    "train.loss",
    "train.accuracy",
    "schedule.layout",
)
_OF_OPTIMIZERS = {
    "sgd": ("momentum", "nesterov", "weight_decay"),
    "adam": ("betas", "eps", "weight_decay"),
    "adamw": ("betas", "eps", "weight_decay"),
}


def step_parts(
    code: Mapping[str, str],
    train: TrainSpec,
    schedule: ScheduleSpec,
    x: torch.Tensor,
    y: torch.Tensor,
    device: torch.device,
) -> dict[str, str]:
    """What the schedules of a spec's training step depend on, readable. `x` and `y` are an example of a whole batch;
    `code` is what `code_parts` found before any of it ran.

    Not in it: weights, learning rate, what is done to records before they are a batch. Which parameters are frozen, and
    which have no weight decay, follows from the model and from what the spec says. The device's precision switches are
    those of this moment.
    """
    options = options_of(schedule)
    clip = {"train.clip_norm": repr(train.clip_norm)} if train.clip_norm is not None else {}
    return {
        **code,
        **devices.facts(device),
        "format": str(FORMAT_VERSION),
        "mode": "training",
        "input": f"x:{_name(x.dtype)}{list(x.shape)}, y:{_name(y.dtype)}{list(y.shape)}",
        "tolerance": repr(schedule.tolerance or default_tolerance_of(code["model.dtype"], device)),
        **option_parts(options),
        "schedule.layout": options.layout,
        **_optimizer_parts(train.optimizer),
        **clip,
        "train.accumulate": str(train.accumulate),
        "train.freeze": json.dumps(sorted(set(train.freeze))),
        "train.accuracy": "of the class scores",  # the rule of which output these are
    }


def code_parts(model: ModelSpec, train: TrainSpec) -> dict[str, str]:
    """The parts of a step's key that name the model, with its precision, and the loss.

    Raises ModelError for a missing file or package, ModelChanged.
    """
    parts = identity(model)
    if ":" not in train.loss:
        smoothing = f", label smoothing {train.label_smoothing!r}" if train.label_smoothing else ""
        return parts | {LOSS: train.loss + smoothing}
    found = python_identity(parse_source(train.loss))
    own = {f"{LOSS}.{name.removeprefix('model.')}": value for name, value in found.items() if name != "model.source"}
    return parts | own | {LOSS: found["model.source"]}


def default_tolerance_of(precision: str, device: torch.device) -> float:
    """The default tolerance of the narrowest type that a step computes in, whatever types its module contains.

    Products in TF32 have fp16's ten bits.
    """
    return verify.TOLERANCE["fp16" if precision == "fp32" and devices.multiplies_in_tf32(device) else precision]


def program_parts(parts: Mapping[str, str], role: Role) -> dict[str, str]:
    """The key parts of one of a step's programs."""
    return {**parts, _PROGRAM: role.value}


def program_key(parts: Mapping[str, str], role: Role) -> str:
    """The key of one of a step's programs."""
    return schedule_key(program_parts(parts, role))


def forward_parts(step: Mapping[str, str], x: torch.Tensor, layout: str) -> dict[str, str]:
    """The key parts of a step's forward pass for batches like `x`, from the step's own; its weights lie in `layout`.

    What only loss and update depend on is left out.
    """
    own = {name: value for name, value in step.items() if not name.startswith(_OF_UPDATES)}
    shape = f"x:{_name(x.dtype)}{list(x.shape)}"
    return {**own, "input": shape, "weights.memory_format": layout, _PROGRAM: Role.VALIDATION.value}


def check_seed(parts: Mapping[str, str]) -> int:
    """The seed of a step's last check, from its key: what passed once passes when it is loaded, or built again."""
    return seed_of(program_key(parts, Role.UPDATE))


def seed_of(key: str) -> int:
    """The seed of checks of what is stored under a key: the same in every attempt."""
    return int(key[:7], 16)


def kernels_digest(schedules: Iterable[Schedule]) -> str:
    """SHA-256, in hex, of what a step's programs compute with: tasks, machine code and memory format.

    Streams and measurements change no bits, and are left out.
    """
    digest = hashlib.sha256()
    for schedule in schedules:
        digest.update(repr((schedule.program.bare(), schedule.layout, schedule.compiled, schedule.binaries)).encode())
    return digest.hexdigest()


def _optimizer_parts(optimizer: OptimizerSpec) -> dict[str, str]:
    found = {name: repr(getattr(optimizer, name)) for name in _OF_OPTIMIZERS[optimizer.name]}
    if optimizer.weight_decay and optimizer.no_decay_on_norms:
        found["weight_decay"] += ", none on norms"
    return {"train.optimizer": optimizer.name, **{f"train.optimizer.{name}": text for name, text in found.items()}}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
