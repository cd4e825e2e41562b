"""The phases of a start: each is a function that there is, and their seconds add up."""

from __future__ import annotations

import importlib
import time
from functools import reduce
from pathlib import Path
from types import ModuleType

import pytest
import torch

from nimble_jobs.bench import zoo
from nimble_jobs.models.build import build
from nimble_jobs.spec import ModelSpec
from tests.scripts import load


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("bench_start")


def test_every_phase_is_a_function_of_the_package(script: ModuleType) -> None:
    """A renamed one would otherwise be found out on the machine that is to be measured."""
    for place in script.PHASES:
        module, _, path = place.partition(":")
        assert callable(reduce(getattr, path.split("."), importlib.import_module(module))), place


def test_a_network_of_the_zoo_loads_the_weights_of_the_file(script: ModuleType, tmp_path: Path) -> None:
    """The factory that a start builds with draws none, and gets those that were written before."""
    script.write_weights("zoo:mobilenet_v2", tmp_path / script.WEIGHTS)
    (tmp_path / "model.py").write_text(script.ZOO.format(name="mobilenet_v2", drawn=False))
    spec = ModelSpec(source=f"python:{tmp_path}/model.py:make", weights=str(tmp_path / script.WEIGHTS))
    built, drawn = build(spec, allowed_python=(tmp_path,)).state_dict(), zoo.create("mobilenet_v2").state_dict()
    assert all(torch.equal(built[name], tensor) for name, tensor in drawn.items())


@pytest.mark.parametrize("name", ["resnet18", "googlenet"])
def test_a_model_of_torchvision_loads_the_weights_of_the_file(name: str, script: ModuleType, tmp_path: Path) -> None:
    """GoogLeNet has heads that the zoo's does not have."""
    script.write_weights(name, tmp_path / script.WEIGHTS)
    build(ModelSpec(source=f"torchvision:{name}", weights=str(tmp_path / script.WEIGHTS)))


def test_a_phase_does_not_count_the_phases_inside(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds of all phases are those of the outermost, also where one is entered again and where one raises."""
    now = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(now)))
    clock = script.Clock(lambda: None)
    with clock.time("outer"):
        with clock.time("inner"):
            pass
        with pytest.raises(KeyError), clock.time("inner"):
            raise KeyError
    assert clock.seconds == {"outer": 3.0, "inner": 2.0}
