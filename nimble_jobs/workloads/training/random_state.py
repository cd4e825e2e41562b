"""The state of every random generator that a training step may draw from, as JSON-able values."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch


def seed_all(seed: int, device: torch.device) -> None:
    """Start all generators from one seed."""
    torch.default_generator.manual_seed(seed % 2**63)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed % 2**63)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def capture(device: torch.device) -> dict[str, Any]:
    """The states as they are now."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    found = {
        "torch": _text(torch.get_rng_state()),
        "numpy": [str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "python": [version, list(words), gauss],
    }
    if device.type == "cuda":
        found["cuda"] = _text(torch.cuda.get_rng_state(device))
    return found


def restore(states: dict[str, Any], device: torch.device) -> None:
    """Inverse of `capture`. A state of CUDA is left out on another device."""
    torch.set_rng_state(_tensor(states["torch"]))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(_tensor(states["cuda"]), device)


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
