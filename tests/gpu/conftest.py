"""Tests of this folder need a CUDA device; without one they skip themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nimble_jobs.models.torchvision_import import import_torchvision

import_torchvision()  # without the compiler, which all test processes would import; before the tests of this folder do
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)
