"""Reading goes on at full width while later stages hold their batches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from nimble_jobs.data import Batch, Reader, open_reader, reader
from nimble_jobs.data.crew import FEW_RUNNING
from nimble_jobs.decoding.work import ALIKE, COLUMNS, HEIGHT, LENGTH, WIDTH, Answer, Work
from nimble_jobs.pipeline import Meter
from nimble_jobs.planner.jobs.loaded import BUFFERS, batch_buffers, number_of_buffers
from nimble_jobs.planner.module.limits import Limits
from nimble_jobs.spec.model import InputSpec
from nimble_jobs.spec.transform import TransformSpec
from nimble_jobs.workloads.cuts import cut
from nimble_jobs.workloads.record_feed import RecordFeed, memory_of

SIZE, WORKERS = 4, 12  # records of a batch, which are one piece of work; processes
RECORDS = SIZE * 40


class Processes:
    """Stand-ins for the processes. They finish the first `quick` pieces at once, and the others once they may."""

    workers, running, trouble, unit = WORKERS, True, None, "process"

    def __init__(self, quick: int) -> None:
        self.quick = quick
        self.held: list[tuple[Work, Future[Answer]]] = []
        self.all_work = threading.Event()
        self._lock, self._open = threading.Lock(), False

    def start(self) -> None: ...

    def share(self, memory: np.ndarray, descriptor: int) -> SimpleNamespace:
        return SimpleNamespace(memory=memory)

    def unshare(self, shared: SimpleNamespace) -> None: ...

    def submit(self, work: Work, shared: object, blobs: object = ()) -> Future[Answer]:
        future: Future[Answer] = Future()
        with self._lock:
            self.quick -= 1
            if self.quick >= 0 or self._open:
                future.set_result(answer(work))
            else:
                self.held.append((work, future))
            if len(self.held) >= WORKERS:
                self.all_work.set()
        return future

    def go_on(self) -> None:
        with self._lock:
            self._open = True
        for work, future in self.held:
            future.set_result(answer(work))


def answer(work: Work) -> Answer:
    rows = np.zeros((len(work), COLUMNS), dtype=np.int64)
    rows[:, [LENGTH, HEIGHT, WIDTH, ALIKE]] = 100, 8, 8, 1
    return Answer(rows=rows, reasons={}, busy_s=0.0)


class Decoding:
    """A stand-in for the stage that decodes on a device: it keeps all batches until it may go on."""

    def __init__(self) -> None:
        self.may = threading.Event()

    def __call__(self, batch: Batch) -> tuple[None, Batch]:
        assert self.may.wait(30)
        batch.release()
        return None, batch

    def close(self) -> None: ...


@pytest.fixture
def pictures(tmp_path: Path) -> Iterator[Reader]:
    """More batches than there are processes and later stages."""
    Image.new("RGB", (8, 8)).save(tmp_path / "a.jpg")
    for i in range(RECORDS):
        (tmp_path / f"{i:03}.jpg").hardlink_to(tmp_path / "a.jpg")
    (tmp_path / "a.jpg").unlink()
    spec = InputSpec(
        source=str(tmp_path), format="images", batch_size=SIZE, transform=TransformSpec(resize=(8, 8), scale=1.0)
    )
    with closing(open_reader(spec)) as found:
        yield found


def feed_of(source: Reader, decoding: Decoding, *, count: Callable[[int], int]) -> RecordFeed:
    """A feed whose memory holds `count` batches of those that the job would take."""
    request = SimpleNamespace(batch_size=SIZE, preprocess=source.preprocess)
    cpu = torch.device("cpu")
    loaded: Any = SimpleNamespace(
        request=request,
        arrivals=SimpleNamespace(begin=lambda: None, end=lambda: None),
        buffers=lambda nbytes, wanted: batch_buffers(nbytes, count(wanted), cpu),
    )
    stages: Any = SimpleNamespace(alone=False, read=Meter("read"), decode=Meter("decode"))
    bounds = cut([(0, RECORDS)], frozenset(), SIZE)
    bad: Any = SimpleNamespace(add=lambda _: None)
    made: Any = decoding
    return RecordFeed(source, loaded, [bounds], stages, last=0, bad=bad, limits=Limits(), decode=lambda _: made)


@pytest.mark.parametrize(
    ("held", "fewest", "all_work"),
    [
        (7, False, True),
        (8, False, False),  # later stages hold seven, so the memory is no larger than it has to be
        (7, True, False),  # with the memory of a job whose records no process reads
    ],
)
def test_all_processes_read_while_later_stages_hold_all_they_may(
    pictures: Reader, monkeypatch: pytest.MonkeyPatch, *, held: int, fewest: bool, all_work: bool
) -> None:
    """Three batches in decoders or on their way there, two in a queue, and two that threads have."""
    monkeypatch.setattr(reader, "PIECE_ENCODED", SIZE)
    processes, decoding = Processes(quick=held), Decoding()
    hired: Any = processes
    pictures.hire(hired)
    feed = feed_of(pictures, decoding, count=(lambda _: BUFFERS) if fewest else (lambda wanted: wanted))
    with ThreadPoolExecutor(1) as pool:
        arrived = pool.submit(list, feed.arrived())
        try:
            assert processes.all_work.wait(10 if all_work else 0.5) is all_work
        finally:
            decoding.may.set()
            processes.go_on()
        assert [index for _, part in arrived.result() for index in part.batch.indexes] == list(range(RECORDS))


def test_memory_of_a_job(pictures: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than there are batches, and no more than before where threads read."""
    monkeypatch.setattr(reader, "PIECE_ENCODED", SIZE)

    def count(size: int) -> int:
        request: Any = SimpleNamespace(batch_size=size, preprocess=pictures.preprocess)
        nbytes, number = memory_of(request, pictures, encoded=True)
        assert nbytes == size * pictures.encoded_bytes
        return number

    assert count(SIZE) == BUFFERS
    hired: Any = Processes(quick=0)
    pictures.hire(hired)
    assert RECORDS >= FEW_RUNNING
    assert count(SIZE) == WORKERS + 7
    assert count(2 * SIZE) == WORKERS // 2 + 7
    assert count(RECORDS // 10) == 10  # batches in all
    assert count(RECORDS) == BUFFERS


@pytest.mark.parametrize(
    ("nbytes", "wanted", "expected"),
    [(10 << 20, 8, 8), (10 << 20, 23, 23), (40 << 20, 23, 12), (80 << 20, 23, 8), (1 << 30, 23, 6)],
)
def test_large_batches_get_fewer_buffers(nbytes: int, wanted: int, expected: int) -> None:
    """Beyond the usual number they take 512 MiB at most, and always 2 GiB, unless the fewest need more."""
    assert number_of_buffers(nbytes, wanted) == expected
