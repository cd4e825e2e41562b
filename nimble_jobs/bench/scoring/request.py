"""What is to be measured: systems, their settings, files, model. Pure values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from nimble_jobs.bench.request import split
from nimble_jobs.bench.zoo import entry
from nimble_jobs.errors import UsageError


class System(StrEnum):
    """One way from files to Parquet."""

    OURS_GPU = "ours-gpu-decode"
    OURS_CPU = "ours-cpu-decode"
    EAGER = "dataloader-eager"
    COMPILED = "dataloader-compiled"
    TORCHVISION = "dataloader-torchvision"
    GPU_DECODE = "gpu-decode"
    RAY = "ray-data"

    @property
    def ours(self) -> bool:
        return self in (System.OURS_GPU, System.OURS_CPU)

    @property
    def by_hand(self) -> bool:
        return not self.ours and self is not System.RAY

    @property
    def loop(self) -> str:
        """The module of `nimble_jobs.bench.loops`."""
        return self.value.replace("-", "_")


# Why a system says nothing where there is no GPU.
WITHOUT_GPU = {
    System.OURS_GPU: "needs a CUDA device: pictures are decoded on it",
    System.GPU_DECODE: "needs a CUDA device: pictures are decoded on it",
    System.COMPILED: "needs a CUDA device: without one it is dataloader-eager",
    System.TORCHVISION: "needs a CUDA device: compiled for it",
}
_SIDES = {"inception_v3": 299}  # pixels, of models of torchvision that do not take 224
ZOO = "zoo:"


def side_of(model: str) -> int:
    """Pixels of the images that a model takes. Raises ModelError for one that the zoo does not have."""
    if model.startswith(ZOO):
        return entry(model.removeprefix(ZOO)).input_shape[-1]
    return _SIDES.get(model, 224)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a system is tuned by."""

    batch_size: int
    workers: int | None = None  # None: the system decides

    def __str__(self) -> str:
        return f"batch {self.batch_size}" + ("" if self.workers is None else f", {self.workers} workers")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the command was asked for; None: a default that depends on the device or the model."""

    models: tuple[str, ...]
    dtype: str | None = None
    format: str = "images"  # images | npy
    files: Path | None = None
    count: int = 8192
    size: tuple[int, int] = (500, 375)  # width, height
    photos: Path | None = None
    side: int | None = None
    systems: tuple[System, ...] = tuple(System)
    rounds: int = 3
    batch_sizes: tuple[int, ...] = (64, 128)
    workers: tuple[int, ...] | None = None  # to try for every loop; None: by the number of CPUs
    fixed: Mapping[System, Setting] = field(default_factory=dict)  # settings that are not searched for
    mode: str = "reduce-overhead"  # of torch.compile in loops
    uncached: bool = False
    device: str = "auto"


@dataclass(frozen=True, kw_only=True)
class ScoringRequest:
    """One model on one device, with everything that was left to defaults decided."""

    asked: Wanted
    model: str
    dtype: str
    side: int  # pixels
    device: str  # cpu | cuda
    cpus: int

    def settings(self, system: System) -> list[Setting]:
        """What to try for a system."""
        if system in self.asked.fixed:
            return [self.asked.fixed[system]]
        workers = (None,) if system.ours else self.asked.workers or self._usual_workers(system)
        return [Setting(batch_size=batch, workers=w) for batch in self.asked.batch_sizes for w in workers]

    def _usual_workers(self, system: System) -> tuple[int, ...]:
        if system is System.GPU_DECODE:  # they only read files
            return tuple(sorted({0, max(1, self.cpus // 4), max(1, self.cpus // 2)}))
        if system is System.RAY:
            return (self.cpus,)
        return tuple(sorted({max(1, self.cpus // 2), self.cpus}))


def systems_of(text: str | None) -> tuple[System, ...]:
    """`all`, `ours`, `loops`, or names with commas between. Raises UsageError."""
    if text is None:
        return tuple(System)
    groups = {
        "all": tuple(System),
        "ours": tuple(s for s in System if s.ours),
        "loops": tuple(s for s in System if s.by_hand),
    }
    found: list[System] = []
    for name in split(text, "--systems"):
        if name in groups:
            found += groups[name]
        elif name in set(System):
            found.append(System(name))
        else:
            raise UsageError(
                f"--systems: unknown system {name!r}; expected all, ours, loops, or one of {', '.join(System)}"
            )
    return tuple(dict.fromkeys(found))


def fixed_of(texts: Sequence[str]) -> dict[System, Setting]:
    """SYSTEM=BATCH or SYSTEM=BATCH/WORKERS. Raises UsageError."""
    found = {}
    for text in texts:
        name, _, numbers = text.partition("=")
        batch, slash, workers = numbers.partition("/")
        right = batch.isdecimal() and int(batch) > 0 and (workers.isdecimal() if slash else True)
        if name not in set(System) or not right:
            raise UsageError(
                f"--setting: {text!r}; expected SYSTEM=BATCH or SYSTEM=BATCH/WORKERS, of {', '.join(System)}"
            )
        found[System(name)] = Setting(batch_size=int(batch), workers=int(workers) if slash else None)
    return found


def size_of(text: str) -> tuple[int, int]:
    """Width and height of `500x375`. Raises UsageError."""
    width, cross, height = text.partition("x")
    if not (cross and width.isdecimal() and height.isdecimal() and int(width) >= 8 and int(height) >= 8):
        raise UsageError(f"--size: {text!r}; expected WIDTHxHEIGHT in pixels, at least 8x8")
    return int(width), int(height)
