"""The simulation of the stages before a GPU: small, it feeds all pictures, and shows what memory for batches is for."""

from __future__ import annotations

import re
import sys

import pytest

from tests.scripts import load


def test_more_memory_feeds_more_pictures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With 4 ms a file and eight processes only waiting counts, so that other work on the machine hardly does."""
    words = ["--count", "1024", "--batch", "8", "--processes", "8", "--file-us", "4000", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["simulate_feed", *words])
    load("simulate_feed").main()
    rates = [int(number.replace(",", "")) for number in re.findall(r"([\d,]+) images/s", capsys.readouterr().out)]
    few, own = rates
    assert 0 < 1.2 * few < own
