"""How a rank leaves the others: once its sums are done, and never while theirs may need it."""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from nimble_jobs.engine.private import groups
from nimble_jobs.workloads.training.ranks import gang as gangs
from nimble_jobs.workloads.training.ranks.gang import Gang

CPU = torch.device("cpu")


class DeviceGroup:
    """In place of NCCL's."""


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What each rank's thread did to its device, in order."""
    found: list[str] = []

    def note(what: str) -> None:
        found.append(f"{threading.current_thread().name} {what}")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: note("waits for its device"))
    monkeypatch.setattr(gangs.groups, "abort", lambda _group: note("leaves"))
    return found


def ranks_run(folder: Path, work: Any) -> None:
    """Two connected ranks, each a thread that is named after it."""

    def run(rank: int) -> None:
        host = groups.host_group(folder / "meeting", rank, 2, timeout_s=60.0)
        with Gang(rank, 2, host, DeviceGroup()) as gang:
            work(gang)

    threads = [threading.Thread(target=run, args=(rank,), name=str(rank)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()


def test_a_rank_leaves_once_all_have_done_their_sums(tmp_path: Path, happened: list[str]) -> None:
    """A kernel of another rank may read what this one sent."""
    ranks_run(tmp_path, lambda gang: gang.gather("work"))
    assert sorted(happened[:2]) == ["0 waits for its device", "1 waits for its device"]
    assert sorted(happened[2:]) == ["0 leaves", "1 leaves"]


def test_a_rank_that_fails_leaves_at_once(
    tmp_path: Path, happened: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Its device may wait for sums that never end; the others hear that it is gone."""

    def work(gang: Gang) -> None:
        if gang.leads:
            gang.numbers([1])
            return
        gang.numbers([2])
        with pytest.raises(ValueError, match="broken"), gang:
            raise ValueError("broken")
        gang._host = None  # its process ends, and its connections with it

    ranks_run(tmp_path, work)
    assert "1 waits for its device" not in happened
    assert happened.count("0 leaves") == happened.count("1 leaves") == 1
    assert "all sums of this rank are done, but another rank of the training is gone" in caplog.text


def test_a_rank_whose_device_fails_at_the_end_leaves_all_the_same(
    tmp_path: Path, happened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise Python would free the group, which may hang."""

    def fail() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    host = groups.host_group(tmp_path / "meeting", 0, 1, timeout_s=60.0)
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"), Gang(0, 1, host, DeviceGroup()):
        pass
    assert happened == ["MainThread leaves"]


def test_a_group_does_not_ask_at_a_meeting_that_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread would wait for the removed file, and whoever frees the group for the thread."""
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    seen: list[str] = []

    class Nccl:
        class Options:
            _timeout = None

        def __init__(self, *_: object) -> None:
            seen.append(os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"])

    monkeypatch.setattr(groups.dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    groups.device_group(tmp_path / "meeting", 0, 1, CPU, timeout_s=1.0)
    assert seen == ["0"]
