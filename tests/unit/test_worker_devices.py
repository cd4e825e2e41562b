"""The devices that a command line names."""

from __future__ import annotations

import pytest

from nimble_jobs.errors import UsageError
from nimble_jobs.worker.devices import devices_of


def test_a_list_in_its_order() -> None:
    """Each GPU once, the CPU as often as wanted."""
    assert devices_of("cuda:2, cuda:0") == ("cuda:2", "cuda:0")
    assert devices_of("cpu,cpu,cuda:1") == ("cpu", "cpu", "cuda:1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cuda", "--devices: found 'cuda'; expected all, or a list such as cuda:0,cuda:2 or cpu,cpu"),
        ("cuda:0,", "--devices: found ''; expected all, or a list such as cuda:0,cuda:2 or cpu,cpu"),
        ("cuda:0,cuda:00", "--devices: found 'cuda:00'; expected all, or a list such as cuda:0,cuda:2 or cpu,cpu"),
        ("cuda:\u0663", "--devices: found 'cuda:\u0663'; expected all, or a list such as cuda:0,cuda:2 or cpu,cpu"),
        ("cpu,auto", "--devices: found 'auto'; expected all, or a list such as cuda:0,cuda:2 or cpu,cpu"),
        (
            "cuda:99999999999999999999",
            "--devices: found 'cuda:99999999999999999999'; expected all, or a list such as cuda:0,cuda:2 or cpu,cpu",
        ),
        ("cuda:0,cuda:0", "--devices: cuda:0 is named 2 times; expected each GPU once"),
        (",".join(["cpu"] * 65), "--devices: found 65 devices; expected at most 64"),
    ],
)
def test_lists_that_are_refused(text: str, message: str) -> None:
    """The message names the option and the entry."""
    with pytest.raises(UsageError) as refused:
        devices_of(text)
    assert str(refused.value) == message
