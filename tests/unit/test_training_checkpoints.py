"""Damaged checkpoints are told, never used; resume and init_from are told apart; what is kept is what was asked for."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from nimble_jobs import spec as specs
from nimble_jobs.data.files import remove_tree
from nimble_jobs.errors import CheckpointGone, Damaged, DataError, JobFailed, ModelError
from nimble_jobs.workloads import Stop
from nimble_jobs.workloads.training.batches.epochs import Sampler
from nimble_jobs.workloads.training.keep import checkpoint
from nimble_jobs.workloads.training.keep.state import random_states, restore_random
from tests.trainings import RECORDS, Attempt, digests, lay_out, metrics, spec_of
from tests.waiting import until

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data that all trainings of this module share."""
    found = tmp_path_factory.mktemp("training")
    lay_out(found)
    return found


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[str, str]:
    """What an undisturbed training publishes."""
    Attempt(eager(folder, output="undisturbed/net")).run()
    return digests(folder / "undisturbed/net")


def eager(folder: Path, **changes: Any) -> specs.JobSpec:
    """A spec whose steps run in eager, so that nothing is built."""
    return spec_of(folder, schedule__on_miss="eager", **changes)


def stopped(spec: specs.JobSpec, after: int = 6, **given: Any) -> list[Path]:
    """The checkpoints of a training that was told to stop, oldest first."""
    outcome = Attempt(spec, stop=lambda asked: Stop.DRAIN if asked >= after else Stop.GO, **given).run()
    assert outcome.stop is Stop.DRAIN
    return kept(spec)


def kept(spec: specs.JobSpec) -> list[Path]:
    path = spec.output.path
    return sorted(path.parent.glob(f".{path.name}.training/*/step-*"))


def flip(path: Path) -> None:
    """Turn one bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def lose(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [flip, truncate, lose, empty])
@pytest.mark.parametrize("file", ["model.safetensors", "state.safetensors", "steps.safetensors", "checkpoint.json"])
def test_a_damaged_checkpoint(
    folder: Path, undisturbed: dict[str, str], file: str, damage: Callable[[Path], None]
) -> None:
    """The job says which file is damaged, goes on from the checkpoint before, and ends with the same bytes."""
    spec = eager(folder, output=f"{damage.__name__}-{file}/net")
    *_, before, newest = stopped(spec)
    damage(newest / file)
    second = Attempt(spec, number=2)
    second.run()
    (said,) = second.said("checkpoint-damaged")
    assert str(newest / file) in said
    assert said.endswith(f"; the checkpoint after step {int(before.name[5:])} is used")
    (resumed,) = second.said("resumed")
    assert f"continues after step {int(before.name[5:])} of 14" in resumed
    assert digests(spec.output.path) == undisturbed


def test_all_checkpoints_damaged(folder: Path, undisturbed: dict[str, str]) -> None:
    """Without a sound checkpoint the training starts from its first step and says why."""
    spec = eager(folder, output="all-damaged/net")
    found = stopped(spec)
    for path in found:
        flip(path / "state.safetensors")
    second = Attempt(spec, number=2)
    second.run()
    said = second.said("checkpoint-damaged")
    assert len(said) == len(found)
    assert all(text.endswith("; the training starts over, because there is no other checkpoint") for text in said)
    assert second.said("resumed") == []
    assert digests(spec.output.path) == undisturbed


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), which=st.integers(0, 3))
def test_any_flipped_bit(folder: Path, tmp_path: Path, at: float, bit: int, which: int) -> None:
    """A change of any bit of a checkpoint is noticed."""
    spec = eager(folder, output="bits/net")
    source = (kept(spec) or stopped(spec))[-1]
    copy = tmp_path / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(source, copy)
    assert checkpoint.read(copy).step == 6
    path = sorted(copy.iterdir())[which]
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 1 << bit
    path.write_bytes(data)
    with pytest.raises(Damaged, match=path.name):
        checkpoint.read(copy)


def test_half_written_checkpoints_are_no_checkpoints(folder: Path, undisturbed: dict[str, str]) -> None:
    """What a killed process was writing is ignored, and removed in the end."""
    spec = eager(folder, output="half/net")
    newest = stopped(spec)[-1]
    newest.rename(newest.with_name(f".tmp-job-{newest.name}-0123456789ab"))
    second = Attempt(spec, number=2)
    second.run()
    assert second.said("checkpoint-damaged") == []
    assert digests(spec.output.path) == undisturbed
    assert [p.name for p in spec.output.path.parent.iterdir()] == ["net"]


def test_another_job_goes_on(folder: Path, undisturbed: dict[str, str]) -> None:
    """A later job of the same training resumes from a cancelled one, even if it keeps checkpoints more often."""
    spec = eager(folder, output="another/net")
    assert stopped(spec, job="cancelled")
    changed = eager(folder, output="another/net", train__checkpoint={"every_steps": 5, "keep_last": 1})
    second = Attempt(changed, job="later")
    second.run()
    assert "by attempt 1 of cancelled" in second.said("resumed")[0]
    assert digests(spec.output.path) == undisturbed


def test_another_training_does_not(folder: Path) -> None:
    """With another learning rate the training starts anew, says what differs, and leaves the other's checkpoints."""
    first = eager(folder, output="lr/net")
    left = stopped(first)
    second = Attempt(eager(folder, output="lr/net", train__optimizer={"name": "sgd", "lr": 0.01}), job="later")
    second.run()
    (said,) = second.said("other-training")
    assert "train.optimizer.lr was 0.05 and is 0.01 now" in said
    assert second.said("resumed") == []
    assert kept(first) == left


def test_never(folder: Path, undisturbed: dict[str, str]) -> None:
    """`resume: never` starts each attempt from the first step and leaves the checkpoints of others alone."""
    auto = eager(folder, output="never/net")
    left = stopped(auto)
    spec = eager(folder, output="never/net", train__resume="never")
    stopped(spec, job="later")
    second = Attempt(spec, job="later", number=2)
    second.run()
    assert second.said("resumed") == []
    assert digests(spec.output.path) == undisturbed
    assert kept(auto) == left


def test_a_named_checkpoint(folder: Path, undisturbed: dict[str, str]) -> None:
    """`resume: PATH` resumes the training of that checkpoint, with another output."""
    newest = stopped(eager(folder, output="named/net"))[-1]
    spec = eager(folder, output="named-on/net", train__resume=str(newest))
    second = Attempt(spec, job="later")
    second.run()
    assert f"continues after step 6 of 14, from {newest}" in second.said("resumed")[0]
    assert digests(spec.output.path) == undisturbed


def test_a_named_checkpoint_of_another_training(folder: Path) -> None:
    """Resuming a changed training is refused; the message says what changed and what to do instead."""
    newest = stopped(eager(folder, output="mixed/net"))[-1]
    spec = eager(folder, output="mixed-on/net", train__resume=str(newest), train__epochs=3)
    with pytest.raises(JobFailed) as caught:
        Attempt(spec, job="later").run()
    assert str(caught.value) == (
        f"train.resume: {newest} belongs to another training: train.epochs was 2 and is 3 now; expected the same "
        f"training, or train.init_from: {newest}/model.safetensors to start a new one from its weights"
    )
    anew = eager(folder, output="mixed-on/net", train__init_from=f"{newest}/model.safetensors", train__epochs=3)
    attempt = Attempt(anew, job="later")
    attempt.run()
    assert attempt.said("resumed") == []
    assert len(metrics(anew.output.path, "step")) == 21


def test_a_named_checkpoint_that_is_damaged(folder: Path) -> None:
    """A path without a sound checkpoint is refused; no other checkpoint is used instead."""
    newest = stopped(eager(folder, output="named-damaged/net"))[-1]
    truncate(newest / "model.safetensors")
    with pytest.raises(JobFailed, match=r"train\.resume: .*model\.safetensors: has \d+ bytes; expected \d+"):
        Attempt(eager(folder, output="x/net", train__resume=str(newest)), job="later").run()


# A training that gets worse after its first epoch.
WORSE: dict[str, Any] = {"train__optimizer": {"lr": 40.0}, "train__lr_schedule": {"warmup_steps": 13}}


@pytest.mark.parametrize("after", [9, 13])
def test_the_best_epoch_survives(folder: Path, after: int) -> None:
    """The best epoch's weights are published, even if that epoch ended before the training was interrupted."""
    keep = {"every_steps": 3, "keep_last": 1, "best": "loss"}
    changes = {"train__checkpoint": keep, "train__epochs": 3, **WORSE}
    whole = eager(folder, output="best/net", **changes)
    Attempt(whole).run()
    losses = [line["loss"] for line in metrics(whole.output.path, "epoch")]
    assert losses.index(min(losses)) == 0, "the test wants a training whose first epoch is the best"
    spec = eager(folder, output=f"best-{after}/net", **changes)
    stopped(spec, after=after)
    attempt = Attempt(spec, number=2)
    attempt.run()
    said = f"model.safetensors is from epoch 1, with loss {losses[0]:.4g}; last.safetensors is from the last epoch"
    assert attempt.said("best") == [said]
    assert digests(spec.output.path) == digests(whole.output.path)
    best, last = (load_file(spec.output.path / f"{name}.safetensors") for name in ("model", "last"))
    assert any(not best[name].equal(last[name]) for name in best)


def test_a_damaged_best_checkpoint(folder: Path) -> None:
    """If the best checkpoint is damaged, those that rely on it are not used, and the best weights are made again."""
    changes = {"train__checkpoint": {"every_steps": 3, "best": "loss"}, **WORSE}
    whole = eager(folder, output="best-whole/net", **changes)
    Attempt(whole).run()
    spec = eager(folder, output="best-damaged/net", **changes)
    stopped(spec, after=11)
    (best,) = (p for p in kept(spec) if p.name == "step-00000007")
    flip(best / "model.safetensors")
    second = Attempt(spec, number=2)
    second.run()
    assert second.said("checkpoint-damaged")
    assert digests(spec.output.path) == digests(whole.output.path)


def test_only_the_last_ones_are_kept(folder: Path) -> None:
    """Between any two steps there are at most keep_last checkpoints."""
    spec = eager(folder, output="last/net", train__checkpoint={"every_steps": 1, "keep_last": 3}, train__epochs=6)
    seen: list[int] = []

    def look(asked: int) -> Stop:
        if asked == 20:
            until(lambda: kept(spec))  # a thread writes them, for which steps do not wait
        seen.append(len(kept(spec)))
        return Stop.GO

    Attempt(spec, stop=look).run()
    assert 1 <= max(seen) <= 4  # the oldest goes after the newest has come


def test_no_checkpoints(folder: Path, undisturbed: dict[str, str]) -> None:
    """`checkpoint: null` keeps nothing, and the next attempt starts from the first step."""
    spec = eager(folder, output="null/net", train__checkpoint=None)
    assert stopped(spec) == []
    second = Attempt(spec, number=2)
    second.run()
    assert second.said("resumed") == []
    assert digests(spec.output.path) == undisturbed


def test_the_disk_refuses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that cannot be written fails the job, so that nobody relies on it."""

    def full(_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "sync_path", full)
    with pytest.raises(DataError, match="step-00000002: cannot be written: No space left on device"):
        Attempt(eager(folder, output="full/net")).run()


def test_a_loss_that_is_not_finite(folder: Path) -> None:
    """The job fails and names the step. It keeps and names the last good checkpoint, which fails there again."""
    with np.load(folder / "train.npz") as data:
        images, labels = data["images"], data["labels"].copy()
    step = 6
    labels[Sampler(RECORDS, 8, seed=0).order(1)[8 * step - 8]] = 4
    np.savez(folder / "broken.npz", images=images, labels=labels)
    spec = eager(
        folder,
        output="nan/net",
        input__source=str(folder / "broken.npz"),
        train__loss=f"python:{folder}/model.py:breaks",
        train__checkpoint={"every_steps": 1},
    )
    for number in (1, 2):
        attempt = Attempt(spec, number=number)
        with pytest.raises(JobFailed) as caught:
            attempt.run()
        newest = kept(spec)[-1]
        assert f"the loss became nan at step {step}; expected a finite number" in str(caught.value)
        assert checkpoint.read(newest).step < step
    assert attempt.said("resumed")
    assert str(newest) in str(caught.value)


def test_weights_that_are_not_finite(folder: Path) -> None:
    """No checkpoint holds weights that are not finite, even if the loss of their step was finite."""
    spec = eager(
        folder,
        output="steep/net",
        train__loss=f"python:{folder}/model.py:steep",
        train__optimizer={"lr": 1e10},
        train__lr_schedule={"name": "constant"},
        train__checkpoint={"every_steps": 1},
    )
    with pytest.raises(JobFailed, match=r"the loss became (nan|-?inf) at step 2|are not finite after step 1;"):
        Attempt(spec).run()
    assert kept(spec) == []
    assert not spec.output.path.exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, r"no checkpoint was kept"),
        ({"train__checkpoint": None}, r"no checkpoint was kept"),
        ({"train__checkpoint": {"best": "loss"}}, r"no checkpoint of them is kept"),
    ],
)
def test_weights_that_break_in_the_last_step(folder: Path, changes: dict[str, Any], said: str) -> None:
    """Weights that are not finite are not published, even if only the last step made them so."""
    spec = eager(
        folder,
        output="last-step/net",
        input__batch_size=RECORDS,
        train__epochs=1,
        train__loss=f"python:{folder}/model.py:steep",
        train__optimizer={"lr": 1e10},
        train__lr_schedule={"name": "constant"},
        train__validation=None,
        **changes,
    )
    with pytest.raises(JobFailed, match=rf"^the weights \S+ are not finite after step 1[;,].* {said}"):
        Attempt(spec).run()
    assert not spec.output.path.exists()


def test_a_frozen_glob_that_matches_nothing(folder: Path) -> None:
    """The error names similar parameters."""
    with pytest.raises(ModelError) as caught:
        Attempt(eager(folder, output="freeze/net", train__freeze=["6.weigth"])).run()
    assert str(caught.value).startswith(
        "train.freeze[0]: '6.weigth' matches no parameter of the model; similar names: 6.w"
    )


def test_a_best_epoch_that_is_damaged_in_the_end(folder: Path) -> None:
    """Damaged weights are never published; another attempt makes them again."""
    changes = {"train__checkpoint": {"every_steps": 3, "best": "loss"}, **WORSE}
    whole = eager(folder, output="end-whole/net", **changes)
    Attempt(whole).run()
    spec = eager(folder, output="end/net", **changes)

    def damage(asked: int) -> Stop:
        if asked == 14:
            while not (best := [p for p in kept(spec) if p.name == "step-00000007"]):
                time.sleep(0.001)  # steps are faster here than the disk
            flip(best[0] / "model.safetensors")
        return Stop.GO

    with pytest.raises(Damaged, match=r"step-00000007/model\.safetensors: its bytes differ from what was written"):
        Attempt(spec, stop=damage).run()
    assert not spec.output.path.exists()
    Attempt(spec, number=2).run()
    assert digests(spec.output.path) == digests(whole.output.path)


def test_a_best_epoch_that_another_job_removed(folder: Path) -> None:
    """If another job of the training ended and removed the best checkpoint, the job fails in a way that is retried."""
    changes = {"train__checkpoint": {"every_steps": 3, "best": "loss"}, **WORSE}
    spec = eager(folder, output="gone/net", **changes)

    def remove(asked: int) -> Stop:
        if asked == 14:
            while not (best := [p for p in kept(spec) if p.name == "step-00000007"]):
                time.sleep(0.001)
            remove_tree(best[0])
        return Stop.GO

    with pytest.raises(CheckpointGone, match=r"step-00000007.*; another job of the same training ended") as caught:
        Attempt(spec, stop=remove).run()
    assert caught.value.retryable
    assert not spec.output.path.exists()


def test_two_jobs_of_one_training(folder: Path, undisturbed: dict[str, str]) -> None:
    """A job that starts while another one trains resumes from its checkpoints, and neither removes the other's."""
    spec = eager(folder, output="two/net", train__checkpoint={"every_steps": 1, "keep_last": 1})
    inner: list[Attempt] = []

    def meanwhile(asked: int) -> Stop:
        if asked == 10:
            while not kept(spec):  # a thread writes them
                time.sleep(0.001)
            states = random_states(CPU)  # other jobs run in other processes
            inner.append(Attempt(spec, job="inner", stop=lambda n: Stop.DRAIN if n >= 2 else Stop.GO))
            inner[0].run()
            restore_random(states, CPU)
        return Stop.GO

    Attempt(spec, job="outer", stop=meanwhile).run()
    assert inner[0].said("resumed")
    assert digests(spec.output.path) == undisturbed
