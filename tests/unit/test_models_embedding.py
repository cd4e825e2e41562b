"""The features under the last linear layer, as an output."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from nimble_jobs.errors import ModelError
from nimble_jobs.models.embedding import WithEmbedding


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()


def test_the_last_linear_layers_input() -> None:
    """Beside the model's own output."""
    model, x = net(), torch.randn(5, 3)
    made = WithEmbedding(model)(x)
    torch.testing.assert_close(made["embedding"], model[1](model[0](x)))
    torch.testing.assert_close(made["output"], model(x))


def test_a_copy_sees_its_own_layer() -> None:
    """A search copies the module to fold its normalisations."""
    given = WithEmbedding(net())
    twin = copy.deepcopy(given)
    with torch.no_grad():
        twin.model[0].weight.zero_()
        twin.model[0].bias.fill_(2.0)
    assert twin(torch.randn(5, 3))["embedding"].unique().tolist() == [2.0]
    assert given(torch.randn(5, 3))["embedding"].unique().numel() > 1


def test_a_model_without_a_linear_layer() -> None:
    """It is refused, with what is missing."""
    with pytest.raises(ModelError, match="embedding needs a model that ends in a linear layer"):
        WithEmbedding(nn.ReLU())
