"""The process that runs one hand-written loop with one setting: what to do is in a JSON file, the result in another.

python -m nimble_jobs.bench.text.loops REQUEST.json RESULT.json
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from nimble_jobs.bench.row import in_words
from nimble_jobs.bench.text.loops.task import Task
from nimble_jobs.models.build import DTYPES


def main(request: Path, result: Path) -> int:
    """The exit code is 1 where the loop failed; the result then says why."""
    asked: dict[str, Any] = json.loads(request.read_text())
    loop = asked.pop("loop")
    torch.set_float32_matmul_precision("high")
    task = Task(**{**asked, "dtype": DTYPES[asked["dtype"]]})
    try:
        importlib.import_module(f"nimble_jobs.bench.text.loops.{loop}").embed(task)
    except Exception as e:  # noqa: BLE001  # whatever a loop raises is a row
        traceback.print_exc()
        result.write_text(json.dumps({"error": in_words(e)}))
        return 1
    result.write_text(json.dumps({"first_at": task.first_at, "padded_tokens": task.padded}))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
