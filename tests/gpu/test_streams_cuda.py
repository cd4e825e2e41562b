"""Streams that each have one user, beside those that torch hands out in turn."""

from __future__ import annotations

import threading

import torch

from nimble_jobs.engine.streams import borrowed, give_back, take

DEVICE = torch.device("cuda", 0)


def test_ours_are_none_of_torchs() -> None:
    """Theirs are few, and ours are as many as were asked for."""
    theirs = {torch.cuda.Stream(DEVICE).cuda_stream for _ in range(100)}
    ours = [take(DEVICE) for _ in range(40)]
    handles = {stream.cuda_stream for stream in ours}
    assert len(theirs) < 100
    assert len(handles) == 40
    assert not handles & theirs
    found = []
    for number, stream in enumerate(ours):
        with torch.cuda.stream(stream):
            found.append(torch.full((1000,), number, device=DEVICE).sum())
    torch.cuda.synchronize(DEVICE)
    assert [int(total) for total in found] == [1000 * number for number in range(40)]
    for stream in ours:
        give_back(stream)


def test_what_another_thread_does_is_no_part_of_a_capture() -> None:
    """Whichever of torch's streams it uses."""
    mine, theirs = torch.zeros(1, device=DEVICE), torch.zeros(1, device=DEVICE)
    mine.add_(0)  # loads the kernel
    torch.cuda.synchronize(DEVICE)
    graph = torch.cuda.CUDAGraph()
    failed = []

    def work() -> None:
        try:
            for stream in [torch.cuda.Stream(DEVICE) for _ in range(64)]:
                with torch.cuda.stream(stream):
                    theirs.add_(1)
                stream.synchronize()
        except RuntimeError as e:
            failed.append(e)

    with borrowed(DEVICE) as stream:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            mine.add_(1)
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            mine.add_(1)
        graph.replay()
    torch.cuda.synchronize(DEVICE)
    assert not failed
    assert (int(mine), int(theirs)) == (2, 64)


def test_urgent_streams_go_first() -> None:
    """The device says so."""
    stream = take(DEVICE)
    assert take(DEVICE, urgent=True).priority < stream.priority == 0
    give_back(stream)
