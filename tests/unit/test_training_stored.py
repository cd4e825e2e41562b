"""Schedules of training steps are stored, found again, and built anew where they are damaged or serve no more."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nimble_jobs.errors import CheckFailed, JobFailed
from nimble_jobs.planner.lookup.stored import Storable, keep
from nimble_jobs.planner.step import live as step_live
from nimble_jobs.schedule import CompiledKernel
from nimble_jobs.store import ScheduleState, Store, open_store
from nimble_jobs.store.builds import Builds
from nimble_jobs.store.home import resolve
from nimble_jobs.workloads import Outcome, Stop
from tests import prefork
from tests.trainings import Attempt, digests, lay_out, spec_of

NO_DROPOUT = {"model__args": {"dropout": 0.0}, "train__epochs": 1, "train__validation": None}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lay_out(tmp_path)
    return tmp_path


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """The store that the trainings of a test share."""
    with open_store(resolve(str(tmp_path / "home"))) as found:
        yield found


def train(folder: Path, output: str, **changes: Any) -> tuple[Outcome, Attempt]:
    spec = spec_of(folder, output=f"{output}/net", **NO_DROPOUT | changes)
    attempt = Attempt(spec, job=output, home=folder / "home")
    return attempt.run(), attempt


def test_the_second_training_of_a_kind_finds_what_the_first_built(folder: Path, store: Store) -> None:
    """Another learning rate and seed still hit, with the results of a training that builds."""
    first, told = train(folder, "first")
    assert (first.schedule["hit"], first.schedule["miss_reason"]) == ("miss", "no schedule is stored under this key")
    (said,) = told.said("schedule")
    assert said.startswith(f"miss {first.schedule['key'][:12]} (no schedule is stored under this key): loading took ")
    changes = {"train__optimizer": {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-3}, "model__seed": 3}
    second, told = train(folder, "second", **changes)
    assert (second.schedule["hit"], second.schedule["miss_reason"]) == ("stored", None)
    assert second.schedule["key"] == first.schedule["key"]
    assert second.schedule["runs"] == "schedule"
    assert told.said("schedule")[0].startswith(f"stored {first.schedule['key'][:12]}: loading took ")
    (entry,) = store.schedules.list()
    assert (entry.key, entry.mode, entry.hits) == (first.schedule["key"], "training", 1)
    assert entry.input == "x:float32[8, 1, 8, 8], y:int64[8]"
    store.schedules.remove([entry.key])
    assert train(folder, "third", **changes)[0].schedule["hit"] == "miss"
    assert digests(folder / "second/net") == digests(folder / "third/net")


def test_a_model_that_keeps_tensors_of_its_calls_is_found_again(folder: Path, store: Store) -> None:
    """Attributes that a call adds to the module are not part of the schedule."""
    (folder / "keeps.py").write_text(
        """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 4)

    def forward(self, x):
        self.last = self.linear(x.flatten(1))
        return self.last
"""
    )
    source = {"model__source": f"python:{folder}/keeps.py:Net", "model__args": {}}
    assert [train(folder, name, **source)[0].schedule["hit"] for name in ("first", "second")] == ["miss", "stored"]


def test_both_programs_of_an_accumulated_step_are_stored(folder: Path, store: Store) -> None:
    """A step of two programs has two rows. It hits only if both are stored, and otherwise builds both."""
    first, _ = train(folder, "first", train__accumulate=2)
    one, other = store.schedules.list()
    assert {entry.parts["train.program"] for entry in (one, other)} == {"update", "accumulate"}
    assert first.schedule["key"] in (one.key, other.key)
    second, _ = train(folder, "second", train__accumulate=2)
    assert second.schedule["hit"] == "stored"
    assert digests(folder / "first/net") == digests(folder / "second/net")
    lost = next(entry for entry in (one, other) if entry.parts["train.program"] == "accumulate")
    store.schedules.remove([lost.key])
    third, _ = train(folder, "third", train__accumulate=2)
    reason = "for batches without an update, no schedule is stored under this key"
    assert (third.schedule["hit"], third.schedule["miss_reason"]) == ("miss", reason)
    assert [entry.state for entry in store.schedules.list()] == [ScheduleState.READY] * 2


def test_an_edited_loss_is_another_step(folder: Path) -> None:
    """The key holds the digest of a loss's file, here the model's too."""
    loss = {"train__loss": f"python:{folder}/losses.py:smooth", "train__validation": None}
    (folder / "losses.py").write_text(
        "from torch.nn.functional import cross_entropy\n\n\n"
        "def smooth(outputs, y):\n    return cross_entropy(outputs, y)\n"
    )
    keys = [train(folder, name, **loss)[0].schedule for name in ("first", "second")]
    assert [found["hit"] for found in keys] == ["miss", "stored"]
    code = (
        "import sys\nfrom pathlib import Path\nfrom tests.unit.test_training_stored import train\n"
        "folder = Path(sys.argv[1])\n"
        "found, _ = train(folder, 'third', train__loss=f'python:{folder}/losses.py:smooth')\n"
        "import json; print(json.dumps([found.schedule['hit'], found.schedule['key']]))"
    )
    text = (folder / "losses.py").read_text()
    (folder / "losses.py").write_text(text.replace("(outputs, y)\n", "(outputs, y, label_smoothing=0.1)\n"))
    hit, key = json.loads(in_a_process(code, str(folder)))  # this one goes on with the loss that it has imported
    assert hit == "miss"
    assert key != keys[0]["key"]


def in_a_process(code: str, *args: str) -> str:
    command = [sys.executable, "-c", code, *args]
    done = prefork.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_a_damaged_schedule_is_set_aside_and_built_again(folder: Path, store: Store) -> None:
    """Damaged machine code is a miss that says so; the rebuilt row is sound, and the next training hits it."""
    first, _ = train(folder, "first")
    key = first.schedule["key"]
    stored = store.schedules.verified(key)
    code = b"machine code that no task of the program names"
    kernel = CompiledKernel(
        name="k", function="k", grid=(1, 1, 1), warps=4, shared_bytes=0, arg_types="O", start=0, nbytes=len(code)
    )
    schedule = replace(stored.load(), compiled=(kernel,), binaries=hashlib.sha256(code).hexdigest())
    keep([Storable(schedule=schedule, parts=stored.parts, constants={}, binaries=code)], store)
    assert train(folder, "second")[0].schedule["hit"] == "stored"
    (artifact,) = (store.home / "artifacts").glob("*/*")
    artifact.chmod(0o600)
    artifact.write_bytes(code[:-1])
    third, told = train(folder, "third")
    assert third.schedule["hit"] == "miss"
    assert third.schedule["miss_reason"].endswith(": its bytes have changed (the SHA-256 differs from the name)")
    assert "was not used" in told.said("schedule")[0]
    assert digests(folder / "first/net") == digests(folder / "third/net")
    assert store.schedules.get(key).state is ScheduleState.READY
    assert train(folder, "fourth")[0].schedule["hit"] == "stored"


def test_a_schedule_that_fails_its_check_is_set_aside_and_built_again(
    folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stored schedule that fails its check is quarantined, and built again."""
    train(folder, "first")
    real, checks = step_live.check_step, []

    def check(*args: Any, **kwargs: Any) -> float:
        checks.append(store.schedules.list()[0].state)
        if len(checks) == 1:
            raise CheckFailed("'loss' differs from eager by a relative norm of 1; the tolerance is 0.001")
        return real(*args, **kwargs)

    monkeypatch.setattr(step_live, "check_step", check)
    second, _ = train(folder, "second")
    assert second.schedule["hit"] == "miss"
    assert second.schedule["miss_reason"].startswith("the stored schedule was not used: 'loss' differs from eager")
    assert checks[1] is ScheduleState.QUARANTINED
    assert store.schedules.list()[0].state is ScheduleState.READY
    assert digests(folder / "first/net") == digests(folder / "second/net")


def test_on_a_miss_the_spec_decides(folder: Path, store: Store) -> None:
    """On a miss the job fails, or runs in eager and stores nothing; on a hit it does neither."""
    with pytest.raises(JobFailed, match=r"schedule\.on_miss is fail, and there is no stored schedule: no schedule is"):
        train(folder, "failed", schedule__on_miss="fail")
    eager, told = train(folder, "eager", schedule__on_miss="eager")
    reason = "schedule.on_miss is eager, and there is no stored schedule: no schedule is stored under this key"
    assert (eager.schedule["runs"], eager.schedule["fallback"]) == ("eager", reason)
    assert told.said("fallback") == [f"runs in eager: {reason}"]
    assert store.schedules.list() == []
    train(folder, "built")
    for on_miss in ("fail", "eager"):
        assert train(folder, f"stored-{on_miss}", schedule__on_miss=on_miss)[0].schedule["hit"] == "stored"
    uses = store.schedules.uses()
    assert (uses.stored, uses.misses) == (2, {"no schedule is stored under this key": 2})


def test_a_hit_searches_and_compiles_nothing(folder: Path) -> None:
    """A hit imports no compiler and records and measures nothing."""
    train(folder, "first")
    code = (
        "import sys\nfrom pathlib import Path\nfrom tests.unit.test_training_stored import train\n"
        "from nimble_jobs.planner.step import build as training, live as step_live\n"
        "step_live.record_step = training.Search.run = None\n"
        "found, _ = train(Path(sys.argv[1]), 'second')\n"
        "assert found.schedule['hit'] == 'stored', found.schedule\n"
        "print([name for name in ('torch._dynamo', 'torch._inductor') if name in sys.modules])"
    )
    done = prefork.run_light(code, str(folder), cwd=Path(__file__).parents[2])
    assert done.stdout.splitlines()[-1] == "[]"


def resumed(folder: Path, output: str, between: Callable[[], object]) -> tuple[Outcome, tuple[str, dict[str, Any]]]:
    """Stop a training, call `meanwhile`, and run its second attempt; the attempt and its event `resumed`."""
    spec = spec_of(folder, output=f"{output}/net", **NO_DROPOUT)
    home = folder / "home"
    assert (
        Attempt(spec, job=output, home=home, stop=lambda asked: Stop.DRAIN if asked >= 3 else Stop.GO).run().stop
        is Stop.DRAIN
    )
    between()
    second = Attempt(spec, job=output, home=home, number=2)
    outcome = second.run()
    (said,) = [(message, data) for kind, message, data in second.events if kind == "resumed"]
    return outcome, said


def test_a_training_goes_on_with_the_schedule_that_it_began_with(folder: Path, store: Store) -> None:
    """A resumed training loads its schedule, or builds it again with the same tasks; both are exact."""
    train(folder, "whole")
    expected = digests(folder / "whole/net")
    outcome, (message, data) = resumed(folder, "stored", lambda: None)
    assert (outcome.schedule["hit"], data["exact"]) == ("stored", True)
    assert "not bit for bit" not in message
    outcome, (_, data) = resumed(folder, "gone", lambda: store.schedules.remove([outcome.schedule["key"]]))
    assert (outcome.schedule["hit"], data["exact"]) == ("miss", True)
    assert digests(folder / "stored/net") == digests(folder / "gone/net") == expected


def test_other_machine_code_under_the_same_key_is_said(folder: Path, store: Store) -> None:
    """Another build of the same key can have other kernels, and the job says that."""

    def replaced() -> None:
        (entry,) = store.schedules.list()
        stored = store.schedules.verified(entry.key)
        code = b"other"
        schedule = replace(stored.load(), binaries=hashlib.sha256(code).hexdigest())
        keep([Storable(schedule=schedule, parts=stored.parts, constants={}, binaries=code)], store)

    outcome, (message, data) = resumed(folder, "other", replaced)
    assert (outcome.schedule["hit"], data["exact"]) == ("stored", False)
    assert "not bit for bit like an uninterrupted training: schedule.digest was" in message


def test_another_source_under_the_same_key_is_left_to_others(folder: Path, store: Store) -> None:
    """A later build with another memory format stays stored; this training builds its own again."""

    def replaced() -> None:
        (entry,) = store.schedules.list()
        stored = store.schedules.verified(entry.key)
        schedule = replace(stored.load(), layout="channels-last")
        keep([Storable(schedule=schedule, parts=stored.parts, constants={}, binaries=b"")], store)

    outcome, (_, data) = resumed(folder, "layout", replaced)
    reason = "the training began with eager kernels; the stored schedule has eager kernels, channels-last"
    assert (outcome.schedule["hit"], outcome.schedule["miss_reason"]) == ("miss", reason)
    assert data["exact"]
    (entry,) = store.schedules.list()
    assert store.schedules.verified(entry.key).load().layout == "channels-last"


def test_what_another_process_stores_meanwhile_is_left_to_others(
    folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process stored another source while the training waited for its turn to build."""
    waited = Builds.turn

    def gone() -> None:
        (entry,) = store.schedules.list()
        stored = store.schedules.verified(entry.key)
        schedule = replace(stored.load(), layout="channels-last")
        store.schedules.remove([entry.key])

        @contextmanager
        def turn(self: Builds, *args: Any, **kwargs: Any) -> Iterator[bool]:
            keep([Storable(schedule=schedule, parts=stored.parts, constants={}, binaries=b"")], store)
            with waited(self, *args, **kwargs) as alone:
                yield alone

        monkeypatch.setattr(Builds, "turn", turn)

    outcome, (_, data) = resumed(folder, "meanwhile", gone)
    assert (outcome.schedule["hit"], data["exact"]) == ("miss", True)
    (entry,) = store.schedules.list()
    assert store.schedules.verified(entry.key).load().layout == "channels-last"
