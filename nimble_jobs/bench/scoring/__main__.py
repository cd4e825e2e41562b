"""Steps of the benchmark that need torch, each in a process of its own.

python -m nimble_jobs.bench.scoring prepare|bare REQUEST.json RESULT.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from nimble_jobs.bench import environment as environments
from nimble_jobs.bench.scoring.bare import bare
from nimble_jobs.bench.scoring.preparation import fitted
from nimble_jobs.engine import device as devices
from nimble_jobs.errors import NimbleError


def _prepare(asked: dict[str, Any]) -> dict[str, Any]:
    """The environment, and weights in a file where they are wanted."""
    device = devices.resolve(asked["device"], "--device")
    if asked.get("weights") is not None:
        model = fitted(asked["model"], [Path(file) for file in asked["files"]], asked["side"])
        save_file(model.state_dict(), asked["weights"])
    found = environments.environment(device)
    return {"environment": {**found, "cpus": len(os.sched_getaffinity(0))}, "device": device.type}


def main(step: str, request: Path, result: Path) -> int:
    """The exit code is 2 where a step refuses what was asked for; the result then says why."""
    asked = json.loads(request.read_text())
    try:
        answer = {"prepare": _prepare, "bare": bare}[step](asked)
    except NimbleError as e:
        result.write_text(json.dumps({"refused": str(e), "exit_code": e.exit_code}))
        return 2
    result.write_text(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
