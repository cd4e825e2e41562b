"""Batches on their way to a device, as far as a CPU has one."""

from __future__ import annotations

import torch

from nimble_jobs.engine.arrivals import Arrivals

CPU = torch.device("cpu")


def test_a_short_batch_repeats_its_last_record() -> None:
    """So that one schedule serves all, and no result depends on what lay there before."""
    arrivals = Arrivals((4, 2), torch.float32, CPU, in_flight=1)
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    arrived = arrivals.upload(x)
    assert arrived is not None
    assert arrived.x.tolist() == [[1, 2], [3, 4], [3, 4], [3, 4]]
    whole = torch.zeros(4, 2)
    arrived = arrivals.upload(whole)
    assert arrived is not None
    assert arrived.x is whole


def test_a_batch_can_be_made_in_place() -> None:
    """Rows are written first, then the last of them is repeated."""
    arrivals = Arrivals((3, 1), torch.uint8, CPU, in_flight=1)
    slot = arrivals.reserve()
    assert slot is not None
    arrived = arrivals.finish(slot, lambda rows: rows.copy_(torch.tensor([[7], [9]])), rows=2)
    assert arrived.x.tolist() == [[7], [9], [9]]
    assert arrived.upload_s() == 0.0
