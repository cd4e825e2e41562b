"""What is to be measured: systems, their settings, texts, model. Pure values."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from nimble_jobs.bench.request import split
from nimble_jobs.bench.text.corpus import Recipe
from nimble_jobs.errors import UsageError


class TextSystem(StrEnum):
    """One way from a file of texts to a file of embeddings."""

    EMPTY = "ours-empty-store"
    STORED = "ours-stored"
    SENTENCE_TRANSFORMERS = "sentence-transformers"
    COMPILED = "compiled-sorted"
    EAGER = "eager-sorted"
    PADDED = "compiled-padded"

    @property
    def ours(self) -> bool:
        return self in (TextSystem.EMPTY, TextSystem.STORED)

    @property
    def loop(self) -> str:
        """The module of `nimble_jobs.bench.text.loops`."""
        name = "sentence-transformers-encode" if self is TextSystem.SENTENCE_TRANSFORMERS else self.value
        return name.replace("-", "_")


WITHOUT_GPU = {TextSystem.PADDED: "needs a CUDA device: without CUDA graphs, padding only adds work"}
COMPILE_MODES = ("default", "max-autotune-no-cudagraphs", "reduce-overhead")


@dataclass(frozen=True, kw_only=True)
class TextSetting:
    """What a loop is tuned by."""

    batch_size: int
    mode: str = "default"  # of torch.compile

    def __str__(self) -> str:
        return f"batch {self.batch_size}" + ("" if self.mode == "default" else f", {self.mode}")


@dataclass(frozen=True, kw_only=True)
class TextWanted:
    """What the command was asked for; None: a default that depends on the device."""

    models: tuple[str, ...]  # minilm, bert-base, folders
    recipe: Recipe
    dtype: str | None = None
    systems: tuple[TextSystem, ...] = tuple(TextSystem)
    rounds: int = 3
    batch_sizes: tuple[int, ...] = (32, 128, 256)
    modes: tuple[str, ...] = COMPILE_MODES
    max_length: int = 512  # tokens
    searched: int = 4096  # texts that a setting is tried on
    device: str = "auto"
    ours: dict[str, object] = field(default_factory=dict)  # entries of input.text that replace defaults

    def settings(self, system: TextSystem) -> list[TextSetting]:
        """What to try for a system; ours is used as it comes."""
        if system.ours:
            return []
        modes = self.modes if system is TextSystem.COMPILED else ("default",)
        return [TextSetting(batch_size=batch, mode=mode) for mode in modes for batch in self.batch_sizes]


def text_systems_of(text: str | None) -> tuple[TextSystem, ...]:
    """`all`, `ours`, `loops`, or names with commas between. Raises UsageError."""
    groups = {
        "all": tuple(TextSystem),
        "ours": tuple(s for s in TextSystem if s.ours),
        "loops": tuple(s for s in TextSystem if not s.ours),
    }
    found: list[TextSystem] = []
    for name in split(text or "all", "--systems"):
        if name in groups:
            found += groups[name]
        elif name in set(TextSystem):
            found.append(TextSystem(name))
        else:
            known = ", ".join(TextSystem)
            raise UsageError(f"--systems: unknown system {name!r}; expected all, ours, loops, or of {known}")
    return tuple(dict.fromkeys(found))


def compile_modes_of(text: str) -> tuple[str, ...]:
    """Modes of torch.compile with commas between. Raises UsageError."""
    modes = tuple(split(text, "--compile-modes"))
    for mode in modes:
        if mode not in COMPILE_MODES:
            raise UsageError(f"--compile-modes: unknown mode {mode!r}; expected of {', '.join(COMPILE_MODES)}")
    return modes
