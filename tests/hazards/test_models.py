"""Published models, a few of those that `scripts/check_models.py` compares with eager."""

from __future__ import annotations

from pathlib import Path

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


def test_every_listed_model_has_a_row_in_the_table() -> None:
    """A page that was measured with another list of models is noticed."""
    page = (Path(__file__).parents[2] / "docs" / "measurements" / "models.md").read_text()
    assert all(f"| {name} |" in page for name in load("check_models").MODELS)
