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
    """Meet the others, and then fail, fail and stay, or wait for them; or fail or hang before that."""
    mouth = int(sys.argv[1])

    def say(line: Mapping[str, Any]) -> None:
        os.write(mouth, json.dumps(line).encode() + b"\n")

    part = Part(**json.loads(sys.stdin.readline()))
    does = json.loads(part.job)[part.rank]
    kind, _, when = does.partition(" ")
    failure = {"error": {"kind": kind, "message": REASON}}
    if does == "prepares for ever":
        signal.pause()
    if when == "before it is ready":
        say(failure)
        return 1
    say({"ready": True})
    sys.stdin.readline()
    if when == "before it meets":
        say(failure)
        return 1
    gang = Gang.connect(Path(part.meeting), part.rank, part.count, torch.device("cpu"), timeout_s=part.timeout_s)
    match does:
        case "waits":
            try:
                gang.numbers([part.rank])
            except RankLost as e:
                say({"error": told_as(e)})
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        case _:
            say(failure)
            if when == "and stays":
                signal.pause()
    return 1


if __name__ == "__main__":
    os._exit(main())
