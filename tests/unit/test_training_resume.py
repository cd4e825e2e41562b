"""Interrupted trainings go on exactly, from sound checkpoints, and say what they did."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from nimble_jobs.engine import device as devices
from nimble_jobs.errors import DeviceFault
from nimble_jobs.workloads import Stop
from nimble_jobs.workloads.training.batches import epochs
from tests import prefork
from tests.trainings import Attempt, digests, lay_out, spec_of

pytestmark = pytest.mark.usefixtures("one_thread")  # as the killed processes here use

ASKED = 22  # how often the training in tests.trainings asks: 14 steps, 2 epochs, 3 batches in each validation
# The first steps, before and after a checkpoint, both validations and what follows them, and the end; `--all`: each.
FEW = (1, 2, 3, 5, 8, 10, 12, 16, 19, 21, 22)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data that all trainings of this module share."""
    found = tmp_path_factory.mktemp("training")
    lay_out(found)
    return found


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[str, str]:
    """What an undisturbed training publishes."""
    spec = spec_of(folder, output="undisturbed/net")
    assert Attempt(spec).run().stop is Stop.GO
    return digests(folder / "undisturbed/net")


def interrupted(number: int, how: Stop = Stop.DRAIN) -> dict[str, object]:
    """Keywords of an attempt that is told to stop when it asks for the `number`th time."""
    return {"stop": lambda asked: how if asked >= number else Stop.GO}


def kept(path: Path) -> list[Path]:
    """The checkpoints of the training with this output, oldest first."""
    return sorted(path.parent.glob(f".{path.name}.training/*/step-*"))


@pytest.fixture(params=range(1, ASKED + 1))
def number(request: pytest.FixtureRequest) -> int:
    """When a training is interrupted."""
    if request.param not in FEW and not request.config.getoption("--all"):
        pytest.skip("as others; with --all")
    return int(request.param)


def test_stopped_anywhere(folder: Path, undisturbed: dict[str, str], number: int) -> None:
    """Told to stop after a step or within a validation, a training does, and keeps the step it is at; the next attempt
    publishes the bytes of an undisturbed one.
    """
    spec = spec_of(folder, output=f"stopped-{number}/net")
    outcome = Attempt(spec, **interrupted(number)).run()  # type: ignore[arg-type]
    assert outcome.stop is Stop.DRAIN
    assert not spec.output.path.exists()
    second = Attempt(spec, number=2)
    assert second.run().stop is Stop.GO
    (said,) = second.said("resumed")
    assert said.startswith("continues after step")
    assert "not bit for bit" not in said
    assert digests(spec.output.path) == undisturbed
    assert [p.name for p in spec.output.path.parent.iterdir()] == ["net"]


@pytest.mark.parametrize("number", [1, 3, 9, 12, 17])
def test_stopped_among_batches_that_were_read_together(
    folder: Path, undisturbed: dict[str, str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """With lots of several batches, as on a GPU, a resumed training publishes the same bytes."""
    monkeypatch.setattr(epochs, "lot_size", lambda *_: 3)
    spec = spec_of(folder, output=f"together-{number}/net")
    assert Attempt(spec, **interrupted(number)).run().stop is Stop.DRAIN  # type: ignore[arg-type]
    assert Attempt(spec, number=2).run().stop is Stop.GO
    assert digests(spec.output.path) == undisturbed


KILLED = """
import os, signal, sys, time
from pathlib import Path
from nimble_jobs.engine import device as devices
from nimble_jobs.errors import DeviceFault
from nimble_jobs.workloads import Stop
from tests.trainings import Attempt, spec_of

folder = Path(sys.argv[1])

def attempt(number, output):
    def stop(asked):
        if asked == number:
            while number > 2 and not list((folder / output).parent.glob(".net.training/*/step-*")):
                time.sleep(0.001)  # steps are faster here than the disk
            os.kill(os.getpid(), signal.SIGKILL)
        return Stop.GO
    Attempt(spec_of(folder, output=output), stop=stop).run()

Attempt(spec_of(folder, output="warm-up/net")).run()  # loads everything, once for all of them
for number in map(int, sys.argv[2:]):
    if (child := os.fork()) == 0:
        attempt(number, f"killed-{number}/net")
        os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, number
"""


def test_killed_anywhere(folder: Path, undisturbed: dict[str, str], pytestconfig: pytest.Config) -> None:
    """SIGKILL after any step or within a validation, whatever the checkpoint thread is at: the next attempt publishes
    the same bytes, by the schedule that the first one stored.
    """
    numbers = range(1, ASKED + 1) if pytestconfig.getoption("--all") else FEW
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", KILLED, str(folder), *map(str, numbers)]
    prefork.run(command, cwd=Path(__file__).parents[2], env=environment, check=True)
    for number in numbers:
        spec = spec_of(folder, output=f"killed-{number}/net")
        assert not spec.output.path.exists(), number
        second = Attempt(spec, number=2)
        outcome = second.run()
        assert (outcome.stop, outcome.schedule["hit"]) == (Stop.GO, "stored"), number
        assert number <= 2 or second.said("resumed"), number
        assert all("not bit for bit" not in said for said in second.said("resumed")), number
        assert digests(spec.output.path) == undisturbed, number
        assert [p.name for p in spec.output.path.parent.iterdir()] == ["net"], number


def test_it_goes_on_with_what_it_began_with(folder: Path, undisturbed: dict[str, str]) -> None:
    """A training that began in eager stays in eager, though another attempt could have a schedule: bits come first."""
    began = spec_of(folder, output="began/net", schedule__on_miss="eager")
    Attempt(began, **interrupted(5)).run()  # type: ignore[arg-type]
    second = Attempt(spec_of(folder, output="began/net"), number=2)
    outcome = second.run()
    assert second.said("fallback") == ["runs in eager: the training began in eager and stays exact"]
    assert outcome.schedule["runs"] == "eager"
    assert "not bit for bit" not in second.said("resumed")[0]


def test_a_change_of_the_machine_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If bits may differ, the job says what has changed."""
    spec = spec_of(folder, output="moved/net", schedule__on_miss="eager")
    Attempt(spec, **interrupted(5)).run()  # type: ignore[arg-type]
    facts = devices.facts
    monkeypatch.setattr(devices, "facts", lambda device: {**facts(device), "device.threads": "999"})
    second = Attempt(spec, number=2)
    second.run()
    (said,) = second.said("resumed")
    there = facts(torch.device("cpu"))["device.threads"]
    assert said.endswith(
        f'; not bit for bit like an uninterrupted training: device.threads was "{there}" and is "999" now'
    )


def test_a_device_fault(folder: Path, undisturbed: dict[str, str]) -> None:
    """After a device fault the next attempt resumes from the last checkpoint."""
    spec = spec_of(folder, output="fault/net")

    def fault(asked: int) -> Stop:
        if asked == 9:
            raise DeviceFault("an illegal memory access was encountered")
        return Stop.GO

    with pytest.raises(DeviceFault):
        Attempt(spec, stop=fault).run()
    second = Attempt(spec, number=2)
    second.run()
    assert second.said("resumed")
    assert digests(spec.output.path) == undisturbed
