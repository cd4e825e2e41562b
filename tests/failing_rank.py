"""A rank that does not train: `python -m tests.failing_rank PIPE PARENT`. What it does instead is in `Part.job`."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nimble_jobs.errors import RankLost
from nimble_jobs.workloads.training.ranks.followers import Part, told_as
from nimble_jobs.workloads.training.ranks.gang import Gang

REASON = "not enough memory"


def main() -> int:
    """Meet the others, and then fail, fail and stay, or wait for them."""
    mouth = int(sys.argv[1])

    def say(line: Mapping[str, Any]) -> None:
        os.write(mouth, json.dumps(line).encode() + b"\n")

    part = Part(**json.loads(sys.stdin.readline()))
    say({"ready": True})
    sys.stdin.readline()
    gang = Gang.connect(Path(part.meeting), part.rank, part.count, torch.device("cpu"), timeout_s=part.timeout_s)
    match json.loads(part.job)[part.rank]:
        case "waits":
            try:
                gang.numbers([part.rank])
            except RankLost as e:
                say({"error": told_as(e)})
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        case kind:
            say({"error": {"kind": kind.removesuffix(" and stays"), "message": REASON}})
            if kind.endswith("and stays"):
                signal.pause()
    return 1


if __name__ == "__main__":
    os._exit(main())
