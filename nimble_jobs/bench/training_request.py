"""What is to be measured of training steps."""

from __future__ import annotations

from dataclasses import dataclass

from nimble_jobs.bench.request import TRAINING_FAMILIES, WITHOUT_GPU, Request, Unit, layouts_for, split
from nimble_jobs.bench.zoo import ZOO
from nimble_jobs.errors import UsageError

_CIFAR = (32, 64, 128)
BATCHES: dict[str, tuple[int, ...]] = {  # by network, @SIDE where its images are of another size than the zoo's
    "mobilenet_v2@32": _CIFAR,
    "efficientnet_b0@32": _CIFAR,
    "resnet50@32": _CIFAR,
    "inception_v3": (32,),
    "nasnet_a_mobile": (32,),
    "resnet50": (32,),
    "bert_base": (16,),
}
DTYPES = ("fp32", "bf16")
_UNASKED = tuple(f for f in TRAINING_FAMILIES if f != "compile-max-autotune")


@dataclass(frozen=True, kw_only=True)
class TrainingRequest(Request):
    """One run of the benchmark of training steps."""

    batches: tuple[int, ...] = ()  # none: those of `BATCHES`, else 32
    mode: str = "training"
    fuse: str = "auto"

    def units(self, *, cuda: bool) -> list[Unit]:
        """Everything to measure, model after model."""
        families = self.families or (_UNASKED if cuda else WITHOUT_GPU)
        return [
            Unit(model=model, dtype=dtype, batch=batch, layout=layout, family=family, mode=self.mode)
            for model in self.models
            for dtype in self.dtypes or ("fp32",)
            for batch in self.batches or BATCHES.get(model, (32,))
            for family in families
            for layout in layouts_for(model, family, self.layouts)
        ]


def models_of(text: str) -> tuple[str, ...]:
    """`all`, or networks of the zoo, NAME or NAME@SIDE, separated by commas. Raises UsageError."""
    if text == "all":
        return tuple(BATCHES)
    names = split(text, "--models")
    for name in names:
        network, _, side = name.partition("@")
        if network not in ZOO or (side and not side.isdecimal()):
            expected = f"NAME or NAME@SIDE, with NAME one of {', '.join(ZOO)}"
            raise UsageError(f"--models: unknown model {name!r}; expected {expected}")
    return names
