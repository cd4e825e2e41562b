"""The collector of cycles rests while a model is loaded, and only then."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch
from torch import nn

from nimble_jobs import planner
from nimble_jobs.graph.pause import collector_paused
from nimble_jobs.spec import ModelSpec


def test_the_collector_is_put_back_as_it_was() -> None:
    """Also where it rested already, and after an error."""
    with collector_paused():
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), collector_paused():
        raise KeyError
    assert gc.isenabled()


def test_it_rests_while_a_module_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as torch is loaded a full round takes longer than many a module."""
    enabled = []

    def build(*_args: Any, **_kwargs: Any) -> nn.Module:
        enabled.append(gc.isenabled())
        return nn.Identity()

    loaded = sys.modules["nimble_jobs.planner.jobs.loaded"]
    monkeypatch.setattr(loaded, "build", build)
    model = ModelSpec(source="torchvision:resnet18")
    request = planner.Request(model=model, shape=(3, 32, 32), dtype="float32", batch_size=1)
    loaded.build_module(request, torch.device("cpu"))
    assert enabled == [False]
    assert gc.isenabled()
