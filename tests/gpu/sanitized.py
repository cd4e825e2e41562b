"""Launches plans under CUDA Stream Sanitizer, which a process must have from its start; prints what it says as JSON.

TORCH_CUDA_SANITIZER=1 python -m tests.gpu.sanitized
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch

from nimble_jobs.engine.bind import Bound
from nimble_jobs.engine.launch import streams
from nimble_jobs.graph import make_plan, single_stream
from nimble_jobs.graph.memory import plan_memory
from tests.nets import SHAPE, bound_to, filling, net, recorded
from tests.sanitizer import CAPS, FORK, WHOLE, blind_to_empty_tensors, launched, marked, numbered
from tests.threads import syncs_of, without

DEVICE = torch.device("cuda", 0)


def said(bound: Bound, pool: list[torch.cuda.Stream], *, missing: int | None = None) -> str | None:
    """The first line about a race, or None. The device is at rest afterwards, so that the next launch starts afresh."""
    x = torch.randn(SHAPE, device=DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Event", numbered(torch.cuda.Event, missing))
        found = launched(bound, pool, x)
    torch.cuda.synchronize()
    return found.splitlines()[1] if found is not None else None


def case(name: str, cap: int | None, *, arena: bool) -> dict[str, Any]:
    """What is said of one plan: whole, and without each of its waits and events."""
    module = net(name, DEVICE)
    recording = recorded(module, torch.zeros(SHAPE, device=DEVICE))
    recording = filling(recording) if arena else recording
    plan, _ = make_plan(recording.program, max_streams=cap)
    bound = bound_to(module, recording, plan, DEVICE)
    pool = streams(DEVICE, plan.streams)
    waits = list(syncs_of(bound))
    return {
        "streams": len({stream.cuda_stream for stream in pool}),
        "whole": [said(bound, pool) for _ in range(3)],
        "waits": [said(without(bound, sync), pool) for sync in waits],
        "events": [said(bound, pool, missing=number) for number in range(FORK, marked(bound) + 1)],
        "whole again": said(bound, pool),
    }


def by_program_order(name: str) -> str | None:
    """What is said of a plan whose arena was planned for one stream."""
    module = net(name, DEVICE)
    recording = filling(recorded(module, torch.zeros(SHAPE, device=DEVICE)))
    plan, _ = make_plan(recording.program)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "nimble_jobs.engine.bind.plan_memory",
            lambda program, _plan, among=None: plan_memory(program, single_stream(program)[0], among=among),
        )
        patch.setattr("nimble_jobs.engine.bind.check_memory", lambda *_, **__: None)
        bound = bound_to(module, recording, plan, DEVICE)
    return said(bound, streams(DEVICE, plan.streams))


def main() -> None:
    """Every network on several numbers of streams, with the memory of operators and with that of the arena."""
    with blind_to_empty_tensors():
        cases = {
            f"{name} {cap} {arena}": case(name, cap, arena=arena)
            for name in WHOLE
            for cap in CAPS
            for arena in (False, True)
        }
        memory = {name: by_program_order(name) for name in WHOLE}
    json.dump({"cases": cases, "memory by program order": memory}, sys.stdout)


if __name__ == "__main__":
    main()
