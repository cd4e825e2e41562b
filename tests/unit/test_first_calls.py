"""What is left out because its first calls take long, and what is loaded ahead."""

from __future__ import annotations

import pytest
import torch

from nimble_jobs.engine.first_calls import load_comparison, without_cudnn


def settings() -> tuple[bool, bool]:
    return torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cudnn.enabled


@pytest.mark.parametrize("convolutions", [True, False])
def test_cudnn_is_spared_while_the_call_lasts(convolutions: bool) -> None:
    def call(fails: bool) -> tuple[bool, bool]:
        if fails:
            raise ValueError
        return settings()

    before = settings()
    assert without_cudnn(call, convolutions=convolutions)(False) == (False, before[1] and not convolutions)
    with pytest.raises(ValueError):  # noqa: PT011
        without_cudnn(call, convolutions=convolutions)(True)
    assert settings() == before


def test_the_comparison_runs_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for tensors that would be compared on the host."""
    monkeypatch.setattr(torch.Tensor, "cpu", lambda _: pytest.fail("copied to the host"))
    load_comparison(torch.device("cpu"))
