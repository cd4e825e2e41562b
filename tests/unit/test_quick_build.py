"""A quick build has one candidate: it is captured, checked and timed once, and its instance is what the job runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nimble_jobs.engine import verify
from nimble_jobs.engine.capture import Instance
from nimble_jobs.errors import CheckFailed
from nimble_jobs.planner.forward import target as targets
from nimble_jobs.planner.forward.build import Built, build_best
from nimble_jobs.planner.keys.options import BuildOptions

CPU = torch.device("cpu")
QUICK = BuildOptions(streams=1, fuse="off", layout="given", in_flight=1, eager="reference", quick=True)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """The instances that are captured, and how often one is checked and closed."""
    found: dict[str, list[Any]] = {"captured": [], "checked": [], "closed": []}
    capture, check = targets.capture_several, verify.check

    def captured(*given: Any, **more: Any) -> tuple[Instance, ...]:
        made = capture(*given, **more)
        for instance in made:
            found["captured"].append(instance)
            monkeypatch.setattr(instance, "close", lambda each=instance, close=instance.close: closed(each, close))
        return made

    def checked(instance: Instance, *given: Any, **more: Any) -> float:
        found["checked"].append(instance)
        return check(instance, *given, **more)

    def closed(instance: Instance, close: Callable[[], None]) -> None:
        found["closed"].append(instance)
        close()

    monkeypatch.setattr(targets, "capture_several", captured)
    monkeypatch.setattr(verify, "check", checked)
    return found


def built(options: BuildOptions) -> Built:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU()).eval()
    return build_best(net, {"x": torch.randn(2, 3)}, "key", options, CPU, eager_us=1e6)


def test_the_only_candidate_is_what_runs(counted: dict[str, list[Any]]) -> None:
    found = built(QUICK)
    assert found.failure is None
    (instance,) = found.instances
    assert counted == {"captured": [instance], "checked": [instance], "closed": []}
    x = torch.randn(2, 3)
    instance.inputs["x"].copy_(x)
    instance.replay()
    torch.testing.assert_close(next(iter(instance.outputs.values())), found.module(x))


def test_another_build_captures_what_it_chooses(counted: dict[str, list[Any]]) -> None:
    found = built(BuildOptions(streams=1, fuse="off", eager="reference"))
    assert found.instances[0] not in counted["closed"]
    assert len(counted["captured"]) > len(counted["closed"]) >= 1


def test_one_that_disagrees_with_eager_is_the_caller_s_to_close(
    counted: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def disagrees(*_: Any, **__: Any) -> float:
        raise CheckFailed("it disagrees", error=1.0)

    monkeypatch.setattr(verify, "check", disagrees)
    found = built(QUICK)
    assert "it disagrees" in str(found.failure)
    found.close()
    assert counted["closed"] == counted["captured"]


def test_one_that_cannot_be_used_is_closed(counted: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes once the search is over."""
    monkeypatch.setattr("nimble_jobs.planner.forward.build._Build._against_eager", lambda *_: 1 / 0)
    with pytest.raises(Exception, match="division by zero"):
        built(QUICK)
    assert counted["closed"] == counted["captured"] != []
