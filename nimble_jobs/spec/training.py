"""The section `train` of a spec, as frozen values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from nimble_jobs.spec import paths
from nimble_jobs.spec.fields import DataPath, Frozen, Positive, WeightsFile, Whole, based, or_defaults
from nimble_jobs.spec.units import BadValue, show, wrong

LOSSES = ("cross_entropy", "mse", "bce")
LOSS_EXPECTED = f"{', '.join(LOSSES)} or python:FILE.py:FUNCTION"


def _betas(value: object) -> object:
    numbers = value if isinstance(value, list | tuple) else []
    if len(numbers) != 2 or not all(type(n) in (int, float) and 0 <= n < 1 for n in numbers):
        raise BadValue(wrong(value), "two numbers, at least 0 and below 1")
    return tuple(float(n) for n in numbers)


def _range(largest: float, expected: str) -> tuple[BeforeValidator, WithJsonSchema]:
    """Two numbers in order, above 0 and up to `largest`."""

    def validate(value: object) -> object:
        numbers = value if isinstance(value, list | tuple) else []
        right = len(numbers) == 2 and all(type(n) in (int, float) and 0 < n <= largest for n in numbers)
        if not right or numbers[0] > numbers[1]:
            shown = f"[{', '.join(map(show, numbers))}]" if len(numbers) == 2 else show(value)
            raise BadValue(f"found {shown}", expected)
        return tuple(float(n) for n in numbers)

    number: dict[str, object] = {"type": "number", "exclusiveMinimum": 0, "maximum": largest}
    return BeforeValidator(validate), WithJsonSchema({"type": "array", "items": number, "minItems": 2, "maxItems": 2})


def _resume(text: str, base: Path | None) -> str:
    return text if text in ("auto", "never") else paths.absolute(text, base)


def _loss(text: str, base: Path | None) -> str:
    if text in LOSSES:
        return text
    scheme, _, rest = text.partition(":")
    file, _, function = rest.rpartition(":")
    if scheme != "python" or not file.endswith(".py") or not function.isidentifier():
        raise BadValue(f"found {show(text)}", LOSS_EXPECTED)
    return str(paths.parse_source(text, base))


Metric = Literal["loss", "accuracy", "val_loss", "val_accuracy", "val_f1"]
Betas = Annotated[
    tuple[float, float],
    BeforeValidator(_betas),
    WithJsonSchema(
        {
            "type": "array",
            "items": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
            "minItems": 2,
            "maxItems": 2,
        }
    ),
]


_MOST_STRETCHED = 100.0  # width over height
_Shares = Annotated[tuple[float, float], *_range(1.0, "[smallest, largest], two fractions above 0 and up to 1")]
_Ratios = Annotated[
    tuple[float, float],
    *_range(_MOST_STRETCHED, f"[smallest, largest], width over height, above 0 and up to {_MOST_STRETCHED:g}"),
]


class OptimizerSpec(Frozen):
    """The optimizer, which updates the weights."""

    name: Literal["sgd", "adam", "adamw"] = Field(default="sgd", description="The optimizer.")
    lr: Positive = Field(default=0.01, description="Learning rate: the largest value that lr_schedule reaches.")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="Momentum, for sgd.")
    nesterov: bool = Field(default=False, description="Nesterov momentum, for sgd.")
    betas: Betas = Field(default=(0.9, 0.999), description="Decay of both moments, for adam and adamw.")
    eps: Positive = Field(default=1e-8, description="Added to the denominator, for adam and adamw.")
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False, description="Weight decay.")
    no_decay_on_norms: bool = Field(
        default=False, description="Leave norms, biases and other parameters of one dimension without decay."
    )


class LrScheduleSpec(Frozen):
    """How the learning rate changes."""

    name: Literal["constant", "cosine", "linear", "one_cycle"] = Field(
        default="constant", description="How the rate changes after the warm-up; one_cycle has its own warm-up."
    )
    warmup_steps: int = Field(default=0, ge=0, description="Steps over which the rate rises from zero.")


class RandomResizedCropSpec(Frozen):
    """A random part of each picture, resized to the size that the model takes."""

    scale: _Shares = Field(default=(0.08, 1.0), description="Smallest and largest fraction of the picture's area.")
    ratio: _Ratios = Field(default=(0.75, 1.3333), description="Smallest and largest aspect ratio of the part.")


class AugmentSpec(Frozen):
    """Random changes to training images, the same for equal seed, epoch and record."""

    random_resized_crop: Annotated[
        RandomResizedCropSpec | None,
        BeforeValidator(or_defaults, json_schema_input_type=RandomResizedCropSpec | bool | None),
    ] = Field(
        default=None,
        description="Train on a random part of each picture, resized to the model's size; true: with the defaults.",
    )
    crop_padding: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="Black pixels added on every side before a random crop.",
    )
    flip: Literal["horizontal", "vertical", "both"] | None = Field(
        default=None, description="Flip each image with probability 0.5; both decides each direction independently."
    )


class ValidationSpec(Frozen):
    """Held-out records, of the same format as the input."""

    source: DataPath = Field(description="A file, a folder or a glob.", examples=["digits-val.npz"])
    every_epochs: int = Field(default=1, ge=1, description="Epochs between two validations.")


class CheckpointSpec(Frozen):
    """When the state of a training is kept, and how much of it."""

    every_steps: Whole | None = Field(default=None, description="Steps between two checkpoints.")
    every_epochs: Whole | None = Field(
        default=None, description="Epochs between two checkpoints; 1 unless every_steps is given."
    )
    keep_last: int = Field(default=2, ge=1, description="How many checkpoints are kept.")
    best: Metric | None = Field(default=None, description="The metric whose best epoch becomes model.safetensors.")

    @property
    def epochs(self) -> int | None:
        """Epochs between two checkpoints, None for no checkpoints by epochs."""
        return 1 if self.every_epochs is None and self.every_steps is None else self.every_epochs


class EarlyStoppingSpec(Frozen):
    """When a training ends before its last epoch."""

    metric: Metric = Field(default="val_loss", description="The metric that must improve.")
    patience: int = Field(
        ge=1,
        description="The number of measurements in a row without improvement after which the training ends.",
        examples=[3],
    )
    min_delta: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="Smallest change that counts as better."
    )


class TrainSpec(Frozen):
    """The fine-tuning."""

    epochs: int = Field(default=1, ge=1, le=1_000_000, description="Passes over the input.")
    loss: Annotated[str, based(_loss)] = Field(default="cross_entropy", description=f"The loss: {LOSS_EXPECTED}.")
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=1, description="Fraction of each label spread over all classes."
    )
    optimizer: OptimizerSpec = Field(default=OptimizerSpec(), description="The optimizer and its settings.")
    lr_schedule: LrScheduleSpec = Field(default=LrScheduleSpec(), description="How the learning rate changes.")
    clip_norm: Positive | None = Field(default=None, description="Largest norm of all gradients together.")
    accumulate: int = Field(
        default=1, ge=1, le=65_536, description="Batches whose gradients are averaged into one step."
    )
    last_batch: Literal["keep", "drop"] = Field(
        default="keep", description="What to do with the last batch of an epoch if it is short."
    )
    freeze: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="Globs for names of parameters that are not trained."
    )
    augment: AugmentSpec = Field(default=AugmentSpec(), description="Random changes to training images.")
    init_from: WeightsFile | None = Field(default=None, description="Weights file that a new training starts from.")
    resume: Annotated[str, based(_resume)] = Field(
        default="auto", min_length=1, description="Which unfinished training to continue: auto, never, or a checkpoint."
    )
    checkpoint: CheckpointSpec | None = Field(
        default=CheckpointSpec(), description="When checkpoints are written; null: never."
    )
    validation: ValidationSpec | None = Field(default=None, description="Held-out records.")
    early_stopping: EarlyStoppingSpec | None = Field(default=None, description="When the training ends early.")
    tensorboard: bool = Field(default=False, description="Also write the metrics for TensorBoard.")
