"""Why a rank failed is what its training's attempt ends with, and not that the others miss it. Ranks are processes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nimble_jobs.engine import capture, collectives
from nimble_jobs.engine.collectives import all_reduce_, together
from nimble_jobs.errors import EngineError, JobFailed, NimbleError, OutOfMemory, RankLost
from nimble_jobs.worker.faults import explain
from nimble_jobs.workloads.training.ranks import followers as ranks
from nimble_jobs.workloads.training.ranks.followers import Followers
from nimble_jobs.workloads.training.ranks.gang import Gang
from tests.failing_rank import REASON

CPU = torch.device("cpu")
LONG_S = 600.0


Lead = Callable[[Followers, Gang], object]


@pytest.fixture(autouse=True)
def failing_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks do what `lead` says and do not train."""
    monkeypatch.setattr(ranks, "PROGRAM", "tests.failing_rank")


def lead(then: Lead, *does: str) -> None:
    """Lead ranks that do this, from rank 1 on, once they are connected."""
    devices = ["cpu"] * (1 + len(does))
    plan = json.dumps([None, *does])
    with Followers.start(devices, timeout_s=LONG_S, home="", job=plan, attempt=1, threads=1) as followers:
        then(followers, followers.meet({}, CPU, lambda: None))


def notices_last(followers: Followers, gang: Gang) -> None:
    """Exchange something once rank 1 has said why it fails."""
    while followers._running[0].failure() is None:
        time.sleep(0.01)
    gang.numbers([0])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", [OutOfMemory, JobFailed])
def test_the_reason_of_one_rank_goes_before_what_the_others_miss(
    kind: type[NimbleError], request: pytest.FixtureRequest
) -> None:
    """The leader notices last, when another rank has already said that it lost one. Its process runs no other job."""
    if kind is JobFailed and not request.config.getoption("--all"):
        pytest.skip("as little memory; with --all")
    with pytest.raises(kind) as caught:
        lead(notices_last, "waits", kind.__name__)
    assert str(caught.value) == f"rank 2 (cpu): {REASON}"
    assert explain(caught.value, "cpu") is caught.value
    assert caught.value.ends_process
    assert not kind.ends_process


@pytest.mark.timeout(120)
def test_a_rank_that_dies_without_a_word_goes_before_what_the_others_miss() -> None:
    """The one that was killed is named, not the one that noticed."""
    with pytest.raises(RankLost, match=r"^the process of rank 2 ended: killed by SIGKILL$"):
        lead(notices_last, "waits", "dies")


@pytest.mark.timeout(120)
def test_a_rank_that_says_why_it_fails_and_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the leader would wait for it until the job counts as stalled, and the reason would be lost."""
    monkeypatch.setattr(ranks, "_TELLING_S", 0.2)
    with pytest.raises(OutOfMemory, match=REASON):
        lead(lambda _, gang: gang.numbers([0]), "OutOfMemory and stays")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "does", [("prepares for ever", "JobFailed before it is ready"), ("JobFailed before it meets",)]
)
def test_a_rank_that_fails_before_all_are_connected_is_heard_at_once(does: tuple[str, ...]) -> None:
    """Whichever rank the leader waits for, and also if it waits for the connection."""
    with pytest.raises(JobFailed, match=rf"^rank {len(does)} \(cpu\): {REASON}$"):
        lead(lambda *_: pytest.fail("they are connected"), *does)


@pytest.mark.timeout(120)
def test_a_device_that_fails_once_the_sums_were_ended_is_no_reason() -> None:
    """Ending the leader's own sums can look like a fault of its device; without that, a fault is its own."""

    def faults(followers: Followers, _: Gang) -> None:
        while not followers._aborted:
            time.sleep(0.01)
        faults_alone()

    def faults_alone(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    with pytest.raises(OutOfMemory, match=REASON):
        lead(faults, "OutOfMemory")
    with pytest.raises(torch.AcceleratorError, match="unspecified launch failure"):
        lead(faults_alone, "waits")


NCCL = (
    "NCCL error in: nccl.cpp:35, unhandled cuda error\nncclUnhandledCudaError: Call failed.\nLast error:\nCuda failure "
)


@pytest.mark.parametrize(
    ("said", "kind"),
    [(f"{NCCL}2 'out of memory'", OutOfMemory), (f"{NCCL}1 'peer'", RankLost), ("Connection closed by peer", RankLost)],
)
def test_a_sum_that_lacks_memory_is_no_lost_rank(
    monkeypatch: pytest.MonkeyPatch, said: str, kind: type[NimbleError]
) -> None:
    """NCCL takes its buffers at the first sum, from what torch has left free."""

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(collectives, "all_reduce", fails)
    with together(object()), pytest.raises(kind):
        all_reduce_(torch.ones(2), torch.zeros(1, dtype=torch.int32))
    monkeypatch.setattr("nimble_jobs.engine.private.groups.host_group", fails)
    with pytest.raises(kind):
        Gang.connect(Path("meeting"), 0, 2, CPU, timeout_s=LONG_S)


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_capture_that_lacks_memory_says_so_whoever_noticed(monkeypatch: pytest.MonkeyPatch, wrapped: bool) -> None:
    """Ranks agree on other failures of a capture, which all of them have; this one has one of them alone."""

    def fails(*_: object, **__: object) -> None:
        error = RuntimeError("CUDA error: out of memory")
        if wrapped:
            raise EngineError("the schedule cannot be captured") from error
        raise error

    nothing: Any = None
    monkeypatch.setattr(capture, "bind", fails)
    with pytest.raises(OutOfMemory, match="not enough memory on cpu to capture the schedule"):
        capture.capture(nothing, nothing, state={}, constants={}, device=CPU, memory=object())  # type: ignore[arg-type]
