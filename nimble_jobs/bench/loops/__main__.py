"""The process that runs one hand-written loop: reads what to do from a JSON file, appends a line of JSON a setting.

python -m nimble_jobs.bench.loops REQUEST.json RESULT.jsonl
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torchvision
from safetensors.torch import load_file

from nimble_jobs.bench.loops.task import Task
from nimble_jobs.bench.row import in_words
from nimble_jobs.models.build import DTYPES


def main(request: Path, result: Path) -> int:
    """Run every setting; the exit code is 1 where one failed."""
    asked: dict[str, Any] = json.loads(request.read_text())
    code = 0
    for setting in asked["settings"]:
        begin = time.perf_counter()
        try:
            score = importlib.import_module(f"nimble_jobs.bench.loops.{asked['loop']}").score
            task = _task(asked, setting)
            _clear(Path(task.out))
            seconds = score(task)
            line = {**setting, "run_s": seconds, "ready_s": time.perf_counter() - begin - seconds}
        except Exception as e:  # noqa: BLE001  # whatever a loop raises is a row
            traceback.print_exc()
            line = {**setting, "error": in_words(e)}
            code = 1
        with result.open("a") as file:
            file.write(json.dumps(line) + "\n")
        torch.compiler.reset()
    return code


def _clear(out: Path) -> None:
    """Remove what an earlier setting has written."""
    if out.is_dir():
        shutil.rmtree(out)
    for path in (out, out.with_name(f"{out.name}.ready")):
        path.unlink(missing_ok=True)


def _task(asked: dict[str, Any], setting: dict[str, Any]) -> Task:
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    model = torchvision.models.get_model(asked["model"], weights=None)
    model.load_state_dict(load_file(asked["weights"]))
    given = {f.name: asked[f.name] for f in dataclasses.fields(Task) if f.name in asked}
    return Task(**{**given, **setting, "model": model.eval(), "dtype": DTYPES[asked["dtype"]]})


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
