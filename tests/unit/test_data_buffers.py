"""Buffers in an anonymous shared mapping."""

from __future__ import annotations

import mmap
import threading

from nimble_jobs.data.buffers import Buffers
from tests.waiting import PATIENCE_S


def test_buffers_go_round() -> None:
    """One that is released is offered again; releasing twice offers it once."""
    with Buffers(2, 10) as buffers:
        first, second = buffers.take(), buffers.take()
        assert first is not None
        assert second is not None
        first.array[:3] = 7
        assert buffers.free == 0
        first.release()
        first.release()
        assert buffers.free == 1
        again = buffers.take()
        assert again is not None
        assert again.index == first.index
        assert again.array[:3].tolist() == [7, 7, 7]


def test_who_waits_is_woken_at_the_end() -> None:
    """`take` gives None after `end`, and buffers again after `begin`, and what was taken before counts no more."""
    with Buffers(1, 10) as buffers:
        held = buffers.take()
        assert held is not None
        found: list[object] = []
        thread = threading.Thread(target=lambda: found.append(buffers.take()))
        thread.start()
        buffers.end()
        thread.join(PATIENCE_S)
        assert found == [None]
        buffers.begin()
        again = buffers.take()
        assert again is not None
        held.release()
        assert buffers.free == 0


def test_another_mapping_of_the_descriptor_is_the_same_memory() -> None:
    """As processes that decode use it."""
    with Buffers(2, 100) as buffers:
        mapped = mmap.mmap(buffers.fd, 2 * buffers.nbytes)
        mapped[buffers.nbytes] = 9
        buffers.take()
        second = buffers.take()
        assert second is not None
        assert second.array[0] == 9
        mapped.close()
