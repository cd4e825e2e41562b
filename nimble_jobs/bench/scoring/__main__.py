"""Steps of the benchmark that need torch, each in a process of its own.

python -m nimble_jobs.bench.scoring prepare|bare REQUEST.json RESULT.json
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from nimble_jobs.bench import environment as environments
from nimble_jobs.bench.scoring.bare import bare
from nimble_jobs.bench.scoring.preparation import fitted
from nimble_jobs.bench.scoring.workshop import answer
from nimble_jobs.engine import device as devices


def _prepare(asked: dict[str, Any]) -> dict[str, Any]:
    """The environment, and weights in a file where they are wanted."""
    device = devices.resolve(asked["device"], "--device")
    if asked.get("weights") is not None:
        model = fitted(asked["model"], [Path(file) for file in asked["files"]], asked["side"])
        save_file(model.state_dict(), asked["weights"])
    found = environments.environment(device)
    return {"environment": {**found, "cpus": len(os.sched_getaffinity(0))}, "device": device.type}


if __name__ == "__main__":
    sys.exit(answer({"prepare": _prepare, "bare": bare}, sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
