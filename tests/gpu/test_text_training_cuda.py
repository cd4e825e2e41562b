"""Trainings on texts on a GPU: the losses of plain PyTorch, both buckets captured, and exact resumption."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nimble_jobs.workloads import Stop
from tests.text_trainings import lay_out, spec_of
from tests.trainings import Attempt, digests, metrics

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # Inductor imports what is deprecated


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("texts")
    lay_out(found)
    return found


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_every_bucket_is_replayed(folder: Path, dtype: str) -> None:
    """No bucket falls back to eager, and validations are replayed too."""
    spec = spec_of(folder, output=f"replayed-{dtype}/net", model__dtype=dtype)
    attempt = Attempt(spec, device="cuda:0")
    outcome = attempt.run()
    assert attempt.said("fallback") == []
    assert [bucket["runs"] for bucket in outcome.schedule["buckets"]] == ["schedule", "schedule"]
    assert outcome.schedule["validation"] == "schedule"
    assert 0 <= metrics(spec.output.path, "epoch")[-1]["val_f1"] <= 1


def test_replays_and_eager_give_the_same_losses(folder: Path) -> None:
    """Dropout included: both draw the same random numbers, since shortcuts that depend on a mask are off in both."""
    losses = {}
    for on_miss in ("build", "eager"):
        spec = spec_of(folder, output=f"{on_miss}/net", schedule__on_miss=on_miss, schedule__fuse="off")
        Attempt(spec, device="cuda:0").run()
        losses[on_miss] = [line["loss"] for line in metrics(spec.output.path, "step")]
    assert losses["build"] == pytest.approx(losses["eager"], rel=1e-2)


@pytest.mark.parametrize("number", [2, 5, 8, 11])
def test_stopped_and_resumed(folder: Path, number: int) -> None:
    """A training that is told to stop goes on bit for bit, by the schedules that the first one stored."""
    home = folder / "homes" / "exact"
    undisturbed = spec_of(folder, output="exact/net")
    Attempt(undisturbed, device="cuda:0", home=home).run()
    spec = spec_of(folder, output=f"stopped-{number}/net")

    def stop(asked: int) -> Stop:
        torch.cuda.synchronize()
        return Stop.DRAIN if asked >= number else Stop.GO

    assert Attempt(spec, device="cuda:0", stop=stop, home=home).run().stop is Stop.DRAIN
    second = Attempt(spec, number=2, device="cuda:0", home=home)
    assert second.run().stop is Stop.GO
    (said,) = second.said("resumed")
    assert "not bit for bit" not in said
    assert digests(spec.output.path) == digests(undisturbed.output.path)
