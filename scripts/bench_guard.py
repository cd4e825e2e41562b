"""What it costs at each call to notice that a module was changed after `prepare`.

For each module, with and without gradients: how many modules, tensors and words are watched; microseconds of a look
that finds nothing written, warm, and after 32 MiB of other memory were touched; milliseconds of a look at everything,
which follows only where something was written.

    python scripts/bench_guard.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torchvision
from torch import nn

from nimble_jobs.nimble.facts import Facts

_ROUNDS = 25
_CALLS = 200
_OTHER_MEMORY = 32 << 20  # bytes


def modules() -> dict[str, nn.Module]:
    """By name; the first has 500 parameters."""
    return {
        "250 Linear": nn.Sequential(*(nn.Linear(8, 8) for _ in range(250))),
        "ResNet-50": torchvision.models.resnet50(),
        "ResNet-152": torchvision.models.resnet152(),
        "ViT-L/16": torchvision.models.vit_l_16(),
    }


def warm_us(call: Callable[[], object]) -> float:
    """Median of the rounds, one after the other."""
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        for _ in range(_CALLS):
            call()
        times.append((time.perf_counter() - start) / _CALLS * 1e6)
    return median(times)


def cold_us(call: Callable[[], object]) -> float:
    """Median of single calls, each after other memory filled the caches."""
    other = torch.zeros(_OTHER_MEMORY, dtype=torch.uint8)
    times = []
    for _ in range(_ROUNDS):
        other.add_(1)
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return median(times)


def main() -> None:
    print("| module | gradients | modules | parameters | buffers | warm, us | cold, us | everything, ms |")
    print("|---|---|---|---|---|---|---|---|")
    for name, module in modules().items():
        for training in (False, True):
            facts = Facts.of(module, training=training)
            start = time.perf_counter()
            assert facts.difference(Facts.of(module, training=training)) is None
            whole_ms = (time.perf_counter() - start) * 1e3
            assert facts.untouched()
            counts = [len(list(things)) for things in (module.modules(), module.parameters(), module.buffers())]
            cells = [name, "yes" if training else "no", *map(str, counts)]
            cells += [f"{warm_us(facts.untouched):.1f}", f"{cold_us(facts.untouched):.0f}", f"{whole_ms:.0f}"]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
