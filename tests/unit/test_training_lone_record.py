"""A last batch of a single record is left out of each epoch, and of everything that is planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nimble_jobs import spec as specs
from nimble_jobs.workloads import Stop
from tests.threaded_trainings import Team, threaded_ranks
from tests.trainings import Attempt, digests, lay_out, metrics, spec_of

__all__ = ["threaded_ranks"]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """33 records."""
    found = tmp_path_factory.mktemp("lone")
    lay_out(found)
    with np.load(found / "train.npz") as arrays:
        images, labels = arrays["images"][:33], arrays["labels"][:33]
    np.savez(found / "train.npz", images=images, labels=labels)
    return found


def spec(folder: Path, output: str, **changes: Any) -> specs.JobSpec:
    given = {"train__lr_schedule": {"name": "linear"}, "train__epochs": 4, "input__batch_size": 16}
    return spec_of(folder, output=f"{output}/net", schedule__on_miss="eager", **given | changes)


@pytest.mark.parametrize(("accumulate", "gpus", "steps"), [(1, 1, 8), (2, 1, 4), (1, 2, 8)])
def test_the_learning_rate_ends_with_the_training(
    folder: Path, threaded_ranks: list[Team], accumulate: int, gpus: int, steps: int
) -> None:
    """The plan has as many steps as the training, on several devices and with several batches a step, too."""
    ranks = {"run__gpus": gpus, "run__device": "cpu"} if gpus > 1 else {}
    wanted = spec(folder, f"rate-{accumulate}-{gpus}", train__accumulate=accumulate, **ranks)
    attempt = Attempt(wanted)
    attempt.run()
    rates = [line["lr"] for line in metrics(wanted.output.path, "step")]
    assert rates == pytest.approx([0.05 * (steps - i) / steps for i in range(steps)])
    (said,) = attempt.said("left-out")
    assert said.startswith("1 record is left out of each epoch")
    assert next(r["total"] for r in attempt.reports if "total" in r) == 4 * 32
    assert attempt.reports[-1].get("done", 4 * 32) == 4 * 32


def test_an_interrupted_training_goes_on_exactly(folder: Path) -> None:
    """It says once that a record is left out, and publishes what an undisturbed one does."""
    undisturbed = spec(folder, "undisturbed")
    Attempt(undisturbed).run()
    for number in (2, 3, 7):
        parts = spec(folder, f"parts-{number}")
        assert (
            Attempt(parts, stop=lambda asked, n=number: Stop.DRAIN if asked == n else Stop.GO).run().stop is Stop.DRAIN
        )
        second = Attempt(parts, number=2)
        second.run()
        assert second.said("resumed")
        assert second.said("left-out") == []
        assert digests(parts.output.path) == digests(undisturbed.output.path)


def test_nothing_is_said_if_the_spec_leaves_short_batches_out(folder: Path) -> None:
    """With `last_batch: drop` that is what the user wants."""
    attempt = Attempt(spec(folder, "drop", train__last_batch="drop", train__epochs=1))
    attempt.run()
    assert attempt.said("left-out") == []
