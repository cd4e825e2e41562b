"""What is to be measured: models, systems, batches and dtypes, as a list of units that fail alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nimble_jobs.bench.zoo import MORE, ZOO
from nimble_jobs.errors import UsageError

DTYPES = ("fp32", "fp16", "bf16")
CONTIGUOUS, CHANNELS_LAST, OWN_LAYOUT = "contiguous", "channels-last", "own choice"
LAYOUTS = {
    "contiguous": (CONTIGUOUS,),
    "channels-last": (CHANNELS_LAST,),
    "both": (CONTIGUOUS, CHANNELS_LAST),
}
OURS, OURS_ONE, OURS_MANY = "ours", "ours-1-stream", "ours-streams"
COMPILE = "compile-"  # how the systems of torch.compile begin

# What is prepared at one go, and the systems that come out of it.
FAMILIES: dict[str, tuple[str, ...]] = {
    "eager": ("eager",),
    "torchscript": ("torchscript",),
    "cuda-graph": ("cuda-graph",),
    "compile-default": ("compile-default", "compile-default+graph"),
    "compile-reduce-overhead": ("compile-reduce-overhead",),
    "compile-max-autotune": ("compile-max-autotune",),
    "compile-max-autotune+graph": ("compile-max-autotune+graph",),
    "onnxruntime": ("onnxruntime",),
    "tensorrt": ("tensorrt",),
    "ours": (OURS_ONE, OURS_MANY, OURS),
}
TRAINING_FAMILIES: dict[str, tuple[str, ...]] = {
    "eager": ("eager",),
    "cuda-graph": ("cuda-graph",),
    "compile-default": ("compile-default",),
    "compile-reduce-overhead": ("compile-reduce-overhead",),
    "compile-max-autotune": ("compile-max-autotune",),
    "ours": (OURS_ONE, OURS_MANY, OURS),
}
SYSTEMS = tuple(system for systems in FAMILIES.values() for system in systems)
WITHOUT_GPU = ("eager", "ours")  # families that a machine without a GPU runs unasked
_CHOOSE_THEMSELVES = ("onnxruntime", "tensorrt", "ours")  # these find their own memory format


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What is prepared and measured together: if it fails or takes too long, only its own rows say so."""

    model: str
    dtype: str
    batch: int
    layout: str
    family: str
    mode: str = "inference"  # inference | training

    @property
    def systems(self) -> tuple[str, ...]:
        return (TRAINING_FAMILIES if self.mode == "training" else FAMILIES)[self.family]

    def __str__(self) -> str:
        layout = f", {self.layout}" if self.layout == CHANNELS_LAST else ""
        return f"{self.model} {self.dtype} batch {self.batch} {self.family}{layout}"


@dataclass(frozen=True, kw_only=True)
class Request:
    """One run of the benchmark."""

    models: tuple[str, ...]
    batches: tuple[int, ...] = (1,)
    dtypes: tuple[str, ...] | None = None  # None: fp16 and fp32 on a GPU, fp32 without one
    families: tuple[str, ...] | None = None  # None: all on a GPU, WITHOUT_GPU without one
    layouts: tuple[str, ...] = (CONTIGUOUS, CHANNELS_LAST)
    device: str = "auto"
    in_flight: tuple[int, ...] = ()  # numbers of instances to replay at once
    tolerance: float | None = None  # relative norm against eager; None: by dtype
    limit_s: float = 600.0  # for one unit
    stop_after_s: float | None = None  # for all; what is left then is for a later run
    cold_caches: bool = True  # compilers start with empty caches
    sample_s: float = 1.0  # spent on one median
    idle: bool = False  # profile each system too, which takes a process for each
    fuse: str = "max"  # what our own search may compile: auto | off | max

    def units(self, *, cuda: bool) -> list[Unit]:
        """Everything to measure, model after model."""
        dtypes = self.dtypes or (("fp16", "fp32") if cuda else ("fp32",))
        families = self.families or (tuple(FAMILIES) if cuda else WITHOUT_GPU)
        return [
            Unit(model=model, dtype=dtype, batch=batch, layout=layout, family=family)
            for model in self.models
            for dtype in dtypes
            for batch in self.batches
            for family in families
            for layout in layouts_for(model, family, self.layouts)
        ]


def layouts_for(model: str, family: str, layouts: tuple[str, ...]) -> tuple[str, ...]:
    """The layouts to measure a family in: one for tokens, and for systems that choose themselves; else `layouts`."""
    if family in _CHOOSE_THEMSELVES:
        return (OWN_LAYOUT,)
    images = model not in ZOO or len(ZOO[model].input_shape) == 3  # all others take images
    return layouts if images else (CONTIGUOUS,)


def models_of(text: str) -> tuple[str, ...]:
    """`all`, `more`, or names of the zoo and `torchvision:NAME[@SIDE]`, separated by commas. Raises UsageError.

    `all` stands for the twelve networks of the paper's evaluation, `more` for ten others.
    """
    groups = {"all": tuple(ZOO), "more": tuple(MORE)}
    names: list[str] = []
    for name in split(text, "--models"):
        if name not in (*groups, *ZOO, *MORE) and not name.startswith("torchvision:"):
            known = ", ".join((*ZOO, *MORE))
            expected = f"all, more, torchvision:NAME, or one of {known}"
            raise UsageError(f"--models: unknown model {name!r}; expected {expected}")
        names += groups.get(name, (name,))
    return tuple(dict.fromkeys(names))


def families_of(text: str, families: Mapping[str, tuple[str, ...]] = FAMILIES) -> tuple[str, ...]:
    """`all`, `compile`, `ours`, or systems by name, as families. Raises UsageError."""
    found: list[str] = []
    groups = {"all": tuple(families), "compile": tuple(f for f in families if f.startswith("compile"))}
    for name in split(text, "--systems"):
        members = groups.get(name) or tuple(f for f, systems in families.items() if name == f or name in systems)
        if not members:
            known = ", ".join(system for systems in families.values() for system in systems)
            raise UsageError(f"--systems: unknown system {name!r}; expected all, compile, or one of {known}")
        found += members
    return tuple(dict.fromkeys(found))


def dtypes_of(text: str, known: Sequence[str] = DTYPES) -> tuple[str, ...]:
    """Dtypes by name. Raises UsageError."""
    names = split(text, "--dtype")
    for name in names:
        if name not in known:
            raise UsageError(f"--dtype: unknown dtype {name!r}; expected {', '.join(known)}")
    return names


def layouts_of(text: str) -> tuple[str, ...]:
    """Memory formats. Raises UsageError."""
    if text not in LAYOUTS:
        raise UsageError(f"--layout: unknown layout {text!r}; expected {', '.join(LAYOUTS)}")
    return LAYOUTS[text]


def fuse_of(text: str) -> str:
    """What our search may compile. Raises UsageError."""
    if text not in ("auto", "off", "max"):
        raise UsageError(f"--fuse: {text!r} is unknown; expected auto, off, max")
    return text


def numbers_of(text: str, option: str) -> tuple[int, ...]:
    """Whole numbers from 1. Raises UsageError naming the option."""
    numbers = []
    for word in split(text, option):
        if not word.isdecimal() or int(word) < 1:
            raise UsageError(f"{option}: {word!r} is not a whole number from 1")
        numbers.append(int(word))
    return tuple(numbers)


def split(text: str, option: str) -> tuple[str, ...]:
    """Words between commas, each once. Raises UsageError where there is none."""
    words: Sequence[str] = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise UsageError(f"{option}: found no name; expected at least one")
    return tuple(dict.fromkeys(words))
