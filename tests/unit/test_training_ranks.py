"""A training on several ranks, from spec to published weights: as on one device, up to rounding."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nimble_jobs import spec as specs
from nimble_jobs.engine import device as devices
from nimble_jobs.errors import DevicesTaken, JobFailed, UsageError
from nimble_jobs.planner.step.eager import EagerStep
from nimble_jobs.store import open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.workloads import Stop
from nimble_jobs.workloads.training.batches.together import Share
from nimble_jobs.workloads.training.ranks.places import places
from tests.threaded_trainings import Team, threaded_ranks
from tests.trainings import Attempt, digests, lay_out, metrics, spec_of

__all__ = ["threaded_ranks"]

# Losses of 14 steps in fp32, whose sums are taken in another order.
ROUNDING = 1e-5

MODEL = """
import torch
from torch import nn


def plain():
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(16, 4))


def normal():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(16, 4)
    )


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = plain()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen.add_(x.mean())
        return self.net(x)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("ranks")
    lay_out(found)
    (found / "ranks.py").write_text(MODEL)
    return found


def spec(folder: Path, output: str, *, gpus: int = 2, factory: str = "plain", **changes: Any) -> specs.JobSpec:
    given = {"model__source": f"python:{folder}/ranks.py:{factory}", "run__gpus": gpus, "run__device": "cpu"}
    # Schedules come from recording alone: the search has tests of its own.
    return spec_of(folder, output=f"{output}/net", **given | {"schedule__streams": 1} | changes)


def figures(path: Path) -> list[dict[str, float]]:
    """The numbers of each line of metrics.jsonl."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "kind"} for line in lines]


def test_losses_metrics_and_weights_are_those_of_one_device(folder: Path, threaded_ranks: list[Team]) -> None:
    """Crops, a short last batch of which each rank has two records, and validations on shares included."""
    one, two = spec(folder, "one", gpus=1), spec(folder, "two")
    Attempt(one).run()
    attempt = Attempt(two)
    outcome = attempt.run()
    assert threaded_ranks[0].errors == []
    assert outcome.schedule["ranks"] == 2
    expected, found = figures(one.output.path), figures(two.output.path)
    assert len(expected) == 14 + 2
    for mine, right in zip(found, expected, strict=True):
        assert mine == pytest.approx(right, rel=ROUNDING)
    weights = load_file(one.output.path / "model.safetensors")
    for name, tensor in load_file(two.output.path / "model.safetensors").items():
        assert np.allclose(tensor, weights[name], rtol=1e-3, atol=ROUNDING), name


def test_batch_normalisation_is_that_of_one_device_which_accumulates_the_shares(
    folder: Path, threaded_ranks: list[Team]
) -> None:
    """Each rank normalises its share, as one device does with as many smaller batches a step. Running statistics are
    means over ranks here and follow one share after another there, so figures of validations are left out.
    """
    whole = np.load(folder / "train.npz")
    np.savez(folder / "even.npz", **{name: whole[name][:48] for name in whole.files})  # each batch has equal shares
    same = {"factory": "normal", "input__source": str(folder / "even.npz")}
    two = spec(folder, "shares", **same)
    one = spec(folder, "accumulated", **same, gpus=1, input__batch_size=4, train__accumulate=2)
    unlike = spec(folder, "at-once", **same, gpus=1)
    for each in (two, one, unlike):
        Attempt(each).run()
    assert threaded_ranks[0].errors == []
    losses, expected, others = (
        np.array([line["loss"] for line in metrics(each.output.path, "step")]) for each in (two, one, unlike)
    )
    assert len(losses) == 12
    assert losses == pytest.approx(expected, rel=ROUNDING)
    assert losses != pytest.approx(others, rel=1e-3)  # which is why it differs from one device by more than rounding
    weights = load_file(one.output.path / "model.safetensors")
    for name, tensor in load_file(two.output.path / "model.safetensors").items():
        statistic = "running" in name or "num_batches" in name
        assert statistic or np.allclose(tensor, weights[name], rtol=1e-3, atol=ROUNDING), name


def test_an_interrupted_training_goes_on_exactly(folder: Path, threaded_ranks: list[Team]) -> None:
    """With batch normalisation, whose statistics all ranks share; stopped within an epoch, published bit for bit."""
    whole, parts = spec(folder, "whole", factory="normal"), spec(folder, "parts", factory="normal")
    Attempt(whole).run()
    first = Attempt(parts, stop=lambda asked: Stop.DRAIN if asked == 5 else Stop.GO)
    assert first.run().stop is Stop.DRAIN
    second = Attempt(parts, number=2)
    second.run()
    assert second.said("resumed")[0].startswith("continues after step 5 of 14")
    assert "not bit for bit" not in second.said("resumed")[0]
    assert all(team.errors == [] for team in threaded_ranks)
    assert digests(whole.output.path) == digests(parts.output.path)


def test_a_training_on_another_number_of_devices_is_another_one(folder: Path, threaded_ranks: list[Team]) -> None:
    """It starts over, and says why."""
    first = Attempt(spec(folder, "other"), stop=lambda asked: Stop.DRAIN if asked == 5 else Stop.GO)
    first.run()
    second = Attempt(spec(folder, "other", gpus=1), number=2)
    second.run()
    assert second.said("other-training")[0].endswith("belongs to another training: ranks was 2 and is null now")


def test_a_buffer_that_depends_on_the_share_is_refused_by_name(folder: Path, threaded_ranks: list[Team]) -> None:
    """It would be another one on each rank, and only one of them is published."""
    with pytest.raises(JobFailed, match=r"run.gpus: seen is not the same on all ranks after step 2; .*; expected 1"):
        Attempt(spec(folder, "counts", factory="Counts", schedule__on_miss="eager")).run()
    threaded_ranks[0].join()
    assert [type(e) for e in threaded_ranks[0].errors] == [JobFailed]


def test_bad_records_are_counted_once_and_known_to_all(folder: Path, threaded_ranks: list[Team]) -> None:
    """Shares are then unequal, and the mean is that of all good records. A record alone in its share is left out."""
    data = dict(np.load(folder / "train.npz"))
    images = data["images"][:, None].astype(np.float32) / 255
    images[[3, 30]] = np.nan
    np.savez(folder / "bad.npz", images=images, labels=data["labels"])
    found = []
    for gpus in (1, 2):
        source = str(folder / "bad.npz")
        changes = {"input__source": source, "run__error_threshold": 0.5, "train__validation": None}
        wanted = spec(folder, f"bad-{gpus}", gpus=gpus, **changes)
        attempt = Attempt(wanted)
        attempt.run()
        assert max(report.get("bad") or 0 for report in attempt.reports) == 2
        found.append([line["loss"] for line in metrics(wanted.output.path, "step")])
    # In the second epoch one is bad in the last batch, which has a record less on two devices; its loss is the last.
    assert found[1][:-1] == pytest.approx(found[0][:-1], rel=ROUNDING)


def test_a_rank_says_why_it_fails_before_it_undoes_anything(
    folder: Path, threaded_ranks: list[Team], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is undone may wait for a device, and so for ranks that wait for this one."""
    said_when_closed: list[bool] = []
    close = EagerStep.close

    def noted(step: EagerStep) -> None:
        if threading.current_thread() is not threading.main_thread():
            said_when_closed.append(any("error" in line for line in threaded_ranks[0].said))
        close(step)

    monkeypatch.setattr(EagerStep, "close", noted)
    with pytest.raises(JobFailed):
        Attempt(spec(folder, "told", factory="Counts", schedule__on_miss="eager")).run()
    threaded_ranks[0].join()
    assert said_when_closed
    assert all(said_when_closed)
    (told,) = [line["error"] for line in threaded_ranks[0].said if "error" in line]
    assert told["kind"] == "JobFailed"


@pytest.mark.parametrize("total", [0, 1, 2, 3, 8, 16, 17, 19, 23, 24])
@pytest.mark.parametrize("at_least", [1, 2])
def test_shares_are_the_whole(total: int, at_least: int) -> None:
    """Each record of each batch is one rank's, shares of whole batches are equal, none is larger than those."""
    order, count, size = np.random.default_rng(0).permutation(total), 2, 8
    shares = [Share(rank, count).of(order, size, at_least=at_least) for rank in range(count)]
    each = size // count
    for first in range(0, total, size):
        batch = order[first : first + size]
        at = slice(first // size * each, (first // size + 1) * each)
        parts = [share[at] for share in shares]
        assert sorted(np.concatenate(parts)) == sorted(batch)
        assert all(len(part) == 0 or len(part) >= min(at_least, len(batch)) for part in parts)
    assert sum(map(len, shares)) == total


def test_gpus_of_others_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a worker's GPU nor that of another job's rank is taken; too few are refused, and why."""
    mine = torch.device("cuda", 0)
    monkeypatch.setattr(devices, "present", lambda: [torch.device("cuda", index) for index in range(5)])
    with open_store(resolve(str(tmp_path))) as store, store.workers.hold({"device": "cuda:1"}) as worker:
        with places(store, mine, 2) as found:
            assert found == ["cuda:0", "cuda:2"]
            with places(store, torch.device("cuda", 1), 2) as others:
                assert others == ["cuda:1", "cuda:3"]
                refusal = (
                    "run.gpus: found 2, but only 1 CUDA device of this machine can be had: cuda:0 is taken by another "
                    f"job's rank; cuda:1 is worker {worker.id}'s; cuda:2 is taken by another job's rank; "
                    "cuda:3 is taken by another job's rank; expected fewer, or workers for fewer devices"
                )
                last = torch.device("cuda", 4)
                with pytest.raises(DevicesTaken, match=re.escape(refusal)) as caught, places(store, last, 2):
                    raise AssertionError
                assert caught.value.retryable  # other jobs end
        too_few = "only 4 CUDA devices of this machine can be had: cuda:1 is"
        with pytest.raises(JobFailed, match=too_few) as never, places(store, mine, 5):
            raise AssertionError
        assert not never.value.retryable
        too_many = re.escape("run.gpus: found 6, but this machine has 5 CUDA devices")
        with pytest.raises(UsageError, match=too_many), places(store, mine, 6):
            raise AssertionError


def test_a_leader_whose_own_gpu_is_another_jobs_leaves_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That job was there before the leader's worker was started, and may need all of the memory. Later it has ended."""
    monkeypatch.setattr(devices, "present", lambda: [torch.device("cuda", index) for index in range(4)])
    with open_store(resolve(str(tmp_path))) as store:
        late = torch.device("cuda", 1)
        with places(store, torch.device("cuda", 0), 2) as found:
            assert found == ["cuda:0", "cuda:1"]
            refusal = "run.gpus: cuda:1, on which this job runs, is taken by another job's rank"
            with (
                store.workers.hold({"device": "cuda:1"}),
                pytest.raises(DevicesTaken, match=refusal) as caught,
                places(store, late, 2),
            ):
                raise AssertionError
            assert caught.value.retryable
        with places(store, late, 2) as found:
            assert found == ["cuda:1", "cuda:0"]


def test_more_ranks_than_cores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, ranks share its cores."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    store: Any = None
    with places(store, torch.device("cpu"), 2) as found:
        assert found == ["cpu", "cpu"]
    with (
        pytest.raises(UsageError, match=r"run.gpus: found 3, but this process has 2 cores of the CPU"),
        places(store, torch.device("cpu"), 3),
    ):
        raise AssertionError
