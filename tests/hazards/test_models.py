"""Published models, a few of those that `scripts/check_models.py` compares with eager."""

from __future__ import annotations

import pytest

from tests.scripts import load

FEW = (
    "timm:lcnet_035",
    "timm:ghostnet_050",
    "timm:efficientvit_b0",
    "timm:mobilevit_xxs",
    "torchvision:shufflenet_v2_x0_5",
    "torchvision:lraspp_mobilenet_v3_large",
)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", FEW)
def test_a_published_model(name: str) -> None:
    """Recorded, and equal to eager on inputs of scale 1, 1e-6 and 1e4."""
    check_models = load("check_models")
    row = check_models.check(name)
    assert check_models.verdict(row) == "equal", row
