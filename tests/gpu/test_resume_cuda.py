"""Trainings on a GPU go on exactly: the same bytes whether or not the process was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from nimble_jobs.errors import JobFailed
from tests.trainings import Attempt, digests, lay_out, metrics, spec_of

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # Inductor imports what is deprecated
ROOT = Path(__file__).parents[2]
ASKED = 22  # how often the training asks whether to go on: 14 steps, 2 epochs, 3 batches in each validation
_SIDE_BY_SIDE = max(1, min(14, (os.cpu_count() or 1) // 2))  # processes that share the GPU
TRAIN = """
import os, signal, sys, time
from pathlib import Path
import torch
from nimble_jobs.workloads import Stop
from tests.trainings import Attempt, spec_of

folder, output, number, attempt, miss = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
fuse, home = sys.argv[6], Path(sys.argv[7]) if sys.argv[7] else None

def stop(asked):
    torch.cuda.synchronize()
    if number and asked == number:
        patience = time.monotonic() + 1  # a checkpoint of which figures are still under way is never begun
        while time.monotonic() < patience and not list((folder / output).parent.glob(".net.training/*/step-*")):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
    return Stop.GO

spec = spec_of(folder, output=output, schedule__on_miss=miss, schedule__fuse=fuse)
found = Attempt(spec, number=attempt, device="cuda:0", stop=stop, home=home)
found.run()
for event in found.events:
    print(*event[:2])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("training")
    lay_out(found)
    return found


def train(
    folder: Path,
    output: str,
    *,
    kill_after: int = 0,
    attempt: int = 1,
    on_miss: str,
    fuse: str = "off",
    home: Path | None = None,
) -> tuple[int, str]:
    """A training in a process of its own: its exit code and the events that it told."""
    arguments = [str(folder), output, str(kill_after), str(attempt), on_miss, fuse, str(home or "")]
    command = [sys.executable, "-c", TRAIN, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("runs", ["eager", "stored", "build"])
def test_killed_after_a_step(folder: Path, runs: str) -> None:
    """SIGKILL after every one of the fourteen steps, and within and after each validation, then another attempt.

    Its bytes are those of an undisturbed training, in eager and by a stored schedule with Inductor's kernels, whose
    machine code each process loads. One that builds its schedule anew, tried at three places, may say instead what is
    different.
    """
    changes: dict[str, Any] = {
        "eager": {"on_miss": "eager"},
        "stored": {"on_miss": "fail", "fuse": "auto", "home": folder / "stored"},
        "build": {"on_miss": "fail", "home": folder / "built"},
    }[runs]
    first = {} if runs == "eager" else {"on_miss": "build"}
    again = {"on_miss": "build"} if runs == "build" else {}

    def interrupted(number: int) -> tuple[bool, str]:
        output = f"killed-{runs}-{number}/net"
        code, said = train(folder, output, kill_after=number, **changes)
        assert code == -signal.SIGKILL, said
        kept = any(folder.glob(f"killed-{runs}-{number}/.net.training/*/step-*"))
        home = {"home": folder / f"anew-{number}"} if runs == "build" else {}
        code, said = train(folder, output, attempt=2, **{**changes, **again, **home})
        assert code == 0, said
        return kept, said

    output = f"whole-{runs}/net"
    code, said = train(folder, output, **{**changes, **first})
    assert code == 0, said
    assert ("schedule miss " in said) == (runs != "eager")
    expected = digests(folder / output)
    numbers = range(1, ASKED + 1) if runs != "build" else (6, 10, 17)
    with ThreadPoolExecutor(_SIDE_BY_SIDE) as pool:
        resumed = dict(zip(numbers, pool.map(interrupted, numbers), strict=True))
    assert sum(kept for kept, _ in resumed.values()) > len(numbers) / 2
    for number, (kept, said) in resumed.items():
        assert ("resumed continues after step" in said) == kept
        assert "checkpoint-damaged" not in said
        assert runs == "eager" or f"schedule {'miss' if runs == 'build' else 'stored'} " in said
        exact = runs != "build" or (kept and "not bit for bit" not in said)
        assert not exact or digests(folder / f"killed-{runs}-{number}/net") == expected, (number, said)
        assert runs == "build" or "not bit for bit" not in said


def test_the_curve_of_the_cpu(folder: Path) -> None:
    """The losses on the GPU follow those on the CPU to 1 %, without dropout, whose draws differ."""
    losses = {}
    for device in ("cpu", "cuda:0"):
        changes = {"model__args": {"dropout": 0.0}, "schedule__on_miss": "eager"}
        spec = spec_of(folder, output=f"curve-{device[:4]}/net", **changes)
        Attempt(spec, device=device).run()
        losses[device] = [line["loss"] for line in metrics(spec.output.path, "step")]
    assert losses["cuda:0"] == pytest.approx(losses["cpu"], rel=0.01)


@pytest.mark.parametrize("on_miss", ["eager", "build"])
def test_figures_come_late_but_whole(folder: Path, on_miss: str, device: torch.device) -> None:
    """Each step has its line, in order, though the host reads them many steps later."""
    spec = spec_of(
        folder, output=f"late-{on_miss}/net", schedule__on_miss=on_miss, train__epochs=9, train__clip_norm=1.0
    )
    attempt = Attempt(spec, device=str(device))
    attempt.run()
    steps = metrics(spec.output.path, "step")
    assert [line["step"] for line in steps] == list(range(1, 64))
    assert all(line["loss"] > 0 and line["grad_norm"] > 0 for line in steps)
    assert steps[-1]["loss"] < steps[0]["loss"]


def test_a_loss_that_is_not_finite_on_the_gpu(folder: Path, device: torch.device) -> None:
    """The step is named exactly, though it is found later; what is kept is sound."""
    changes = {
        "train__loss": f"python:{folder}/model.py:steep",
        "train__optimizer": {"lr": 1e10},
        "train__lr_schedule": {"name": "constant"},
        "schedule__on_miss": "eager",
    }
    with pytest.raises(JobFailed, match=r"the loss became (nan|-?inf) at step 2|are not finite after step 2;"):
        Attempt(spec_of(folder, output="steep/net", **changes), device=str(device)).run()


def test_validations_are_replayed(folder: Path, device: torch.device) -> None:
    """They measure what eager measures, epoch by epoch, over weights that move, built or found stored."""
    found = {}
    for on_miss in ("eager", "build", "fail"):
        changes = {"schedule__on_miss": on_miss, "schedule__fuse": "off", "model__args": {"dropout": 0.0}}
        spec = spec_of(folder, output=f"validated-{on_miss}/net", train__epochs=3, **changes)
        attempt = Attempt(spec, device=str(device), home=folder / "homes" / "validated")
        schedule = attempt.run().schedule
        assert schedule["validation"] == ("eager" if on_miss == "eager" else "schedule"), attempt.said("fallback")
        found[on_miss] = [line["val_loss"] for line in metrics(spec.output.path, "epoch")]
    assert found["build"] == pytest.approx(found["eager"], rel=0.01)
    assert found["fail"] == pytest.approx(found["eager"], rel=0.01)
