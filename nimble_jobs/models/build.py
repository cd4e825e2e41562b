"""From a model spec to a module that is ready to run."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from nimble_jobs.errors import ModelError, OutOfMemory
from nimble_jobs.models import from_exported, from_python, from_timm, from_transformers
from nimble_jobs.models.identity import existing
from nimble_jobs.models.source import source_of, weights_entry, weights_file
from nimble_jobs.models.torchvision_import import import_torchvision
from nimble_jobs.models.weights import load_weights, read_weights, save_weights
from nimble_jobs.spec.model import ModelSpec
from nimble_jobs.spec.paths import Source

__all__ = ["DTYPES", "build", "load_weights", "read_weights", "save_weights"]

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def build(
    spec: ModelSpec,
    *,
    device: str = "cpu",
    allowed_python: Sequence[Path] = (),
    headless: bool = False,
    new_head: bool = False,
) -> nn.Module:
    """The module on `device`, in eval mode and in the spec's dtype, with the spec's weights or random ones.

    Equal seeds give equal random weights on every device, since weights are made on the CPU. The process's random
    generators are restored. `headless`: of a folder of transformers, the bare encoder without the head that its
    configuration names; `new_head`: with a head that its weights may lack.
    Raises ModelError, and OutOfMemory if the device has too little memory.
    """
    source = source_of(spec)
    dtype = DTYPES[spec.dtype]
    file, entry = weights_file(spec), weights_entry(spec)
    if file is not None:
        existing(file)
    if source.scheme == "exported":
        return from_exported.build(Path(source.target), spec, dtype, device, allowed_python)
    with _seeded(spec.seed):
        module = _made(spec, source, entry, dtype, allowed_python, headless=headless, new_head=new_head)
    lazy = [n for n, t in (*module.named_parameters(), *module.named_buffers()) if is_lazy(t)]
    if lazy:
        raise ModelError(f"{spec.source}: {lazy[0]} has no shape before a first call; give lazy modules their sizes")
    if file is not None:
        load_weights(module, file)
    # transformers builds in the dtype itself, and keeps the buffers in fp32 that need it.
    return _placed(module, None if source.scheme == "transformers" else dtype, device, spec.source).eval()


def shapes_only(spec: ModelSpec, *, allowed_python: Sequence[Path] = (), headless: bool = False) -> nn.Module:
    """The module on torch's meta device, in eval mode: its weights have names and shapes, but no values. `headless` is
    that of `build`.

    Not for exported programs. Raises ModelError, also if the model's code needs values.
    """
    source = source_of(spec)
    unloaded = spec.model_copy(update={"weights": "none.safetensors"})  # no weights are looked for
    with _seeded(spec.seed), torch.device("meta"):
        made = _made(unloaded, source, None, DTYPES[spec.dtype], allowed_python, headless=headless)
        return made.to(DTYPES[spec.dtype]).eval()


def _made(
    spec: ModelSpec,
    source: Source,
    entry: str | None,
    dtype: torch.dtype,
    allowed_python: Sequence[Path],
    *,
    headless: bool = False,
    new_head: bool = False,
) -> nn.Module:
    drawn = weights_file(spec) is None
    match source.scheme:
        case "torchvision":
            import_torchvision()
            from nimble_jobs.models import from_torchvision  # torchvision takes a second to import

            return from_torchvision.build(source.target, spec.args, entry, drawn=drawn)
        case "timm":
            return from_timm.build(source.target, spec.args, drawn=drawn)
        case "transformers":
            folder, own_weights = Path(source.target), spec.weights is None
            heads = {"headless": headless, "new_head": new_head}
            return from_transformers.build(folder, spec.args, dtype, own_weights=own_weights, **heads)
        case _:
            return from_python.build(Path(source.target), source.factory or "", spec.args, allowed_python)


def _placed(module: nn.Module, dtype: torch.dtype | None, device: str, what: str) -> nn.Module:
    if dtype is not None and any(t.is_complex() for t in (*module.parameters(), *module.buffers())):
        if dtype is not torch.float32:
            raise ModelError(f"model.dtype: {what} has complex weights; expected fp32")
        dtype = None
    try:
        return module.to(device=device, dtype=dtype)
    except torch.OutOfMemoryError as e:
        raise OutOfMemory(f"{what} does not fit on {device}: {e}") from e


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed every generator that a builder may draw from. Restores them and the default dtype afterwards."""
    python, numbers, dtype = random.getstate(), np.random.get_state(), torch.get_default_dtype()
    # Seeding the devices would start CUDA where it is not running yet.
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        try:
            torch.default_generator.manual_seed(seed)
            if devices:
                torch.cuda.manual_seed_all(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numbers)
            torch.set_default_dtype(dtype)
