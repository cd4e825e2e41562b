"""How fast the host feeds a GPU with JPEGs, where there is no GPU: real stages, stand-ins for processes and device.

    python scripts/simulate_feed.py [--buffers 8,0] [--file-us 140] [--processes 16] [--batch 64]

The stages of a scoring job run as they are, from the list of files to the replays. What takes time elsewhere sleeps for
as long: a process that reads (--file-us for each file), the JPEG engines that two decoding threads share, and replays.
So the figures show what threads of this process and waiting for memory cost, and nothing else. --buffers are batches
that the host's memory holds; 0: as many as a job takes. With --claim-ms, pictures come shard by shard, as for one of
two devices that work on a job.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from measuring import ROOT
from PIL import Image

sys.path.insert(0, str(ROOT))

from nimble_jobs.data import Batch, Reader, open_reader
from nimble_jobs.data.buffers import Buffers
from nimble_jobs.decoding.pool import Decoders
from nimble_jobs.job import ShardClaim
from nimble_jobs.pipeline import Meter, Pool
from nimble_jobs.planner.jobs.loaded import batch_buffers
from nimble_jobs.planner.module.limits import Limits
from nimble_jobs.spec.model import InputSpec
from nimble_jobs.spec.transform import TransformSpec
from nimble_jobs.store.shards import shards_in_claim
from nimble_jobs.workloads.claimed_ahead import in_a_row
from nimble_jobs.workloads.cuts import Bounds, cut, cut_claims, shards_of
from nimble_jobs.workloads.decoding import THREADS
from nimble_jobs.workloads.record_feed import RecordFeed

UNDER_WAY, SLOTS = 4, 5  # replays, and batches on the device, as with two instances of a schedule
PROGRAM = """\
import sys, time
sys.path.append({root!r})
import numpy as np
from nimble_jobs.decoding import server
from nimble_jobs.decoding.work import Answer
def do(work, memory, blobs=()):
    time.sleep(len(work) * {file_s})
    rows = np.tile(np.array([[0, 50_000, 375, 500, 7]]), (len(work), 1))
    return Answer(rows=rows, reasons={{}}, busy_s=len(work) * {file_s})
server.do = do
server.main(int(sys.argv[1]))
"""


class Engines:
    """Stands in for the stage that decodes: its threads share the engines, which take batch after batch."""

    def __init__(self, meter: Meter, picture_s: float) -> None:
        self._meter, self._picture_s = meter, picture_s
        self._decoders, self._slots = Pool(range(THREADS)), Pool(range(SLOTS))
        self._slots.begin()
        self._lock, self._free_at = threading.Lock(), 0.0

    def __call__(self, batch: Batch) -> tuple[Any, Batch]:
        decoder, slot = self._decoders.take(), self._slots.take()
        assert decoder is not None
        assert slot is not None
        with self._meter.busy():
            with self._lock:
                done = self._free_at = max(self._free_at, time.perf_counter()) + self._picture_s * len(batch)
            until(done)
        batch.release()
        decoder[1]()
        return SimpleNamespace(release=slot[1]), batch

    def close(self) -> None:
        """Nothing to release."""


def until(moment: float) -> None:
    """Sleep to a moment of `perf_counter`."""
    time.sleep(max(0.0, moment - time.perf_counter()))


def feed_of(reader: Reader, asked: argparse.Namespace, buffers: int, meters: Any) -> RecordFeed:
    """The stages before the replays."""

    def memory(nbytes: int, wanted: int) -> Buffers:
        return Buffers(buffers, nbytes) if buffers else batch_buffers(nbytes, wanted, torch.device("cpu"))

    loaded: Any = SimpleNamespace(
        request=SimpleNamespace(batch_size=asked.batch, preprocess=reader.preprocess),
        arrivals=SimpleNamespace(begin=lambda: None, end=lambda: None),
        buffers=memory,
    )
    turns: Any = [cut([(0, reader.total)], frozenset(), asked.batch)]
    if asked.claim_ms:
        turns = [in_a_row(claimed(reader.total, asked))]
    bad: Any = SimpleNamespace(add=lambda _: None)
    decode: Any = lambda meter: Engines(meter, asked.decode_us / 1e6)  # noqa: E731
    return RecordFeed(reader, loaded, turns, meters, last=0, bad=bad, limits=Limits(), decode=decode)


def claimed(total: int, asked: argparse.Namespace) -> Generator[list[Bounds]]:
    """The batches of one claim after another, as one of two members takes them that are equally fast."""
    shards = [ShardClaim(index=n, start=a, stop=b) for n, (a, b) in enumerate(shards_of(total, asked.shard))]
    while shards:
        time.sleep(asked.claim_ms / 1e3)
        size = shards_in_claim(2 * len(shards), 2)
        yield cut_claims(shards[:size], asked.batch, beyond=0)
        shards = shards[size:]


def run(reader: Reader, asked: argparse.Namespace, buffers: int) -> None:
    """One job, and a line about it."""
    meters: Any = SimpleNamespace(alone=False, read=Meter("read"), decode=Meter("decode"))
    feed, free_at, under_way = feed_of(reader, asked, buffers, meters), 0.0, deque[float]()
    start, cpu_start = time.perf_counter(), time.process_time()
    for arrived, part in feed.arrived():
        while len(under_way) >= UNDER_WAY:
            until(under_way.popleft())
        free_at = max(free_at, time.perf_counter()) + asked.replay_us / 1e6 * len(part.batch)
        under_way.append(free_at)
        arrived.release()  # type: ignore[union-attr]
    for moment in under_way:
        until(moment)
    seconds, cpu_s, batches = time.perf_counter() - start, time.process_time() - cpu_start, reader.total / asked.batch
    read, decode = meters.read.load(), meters.decode.load()
    print(
        f"{buffers or 'own':>4} buffers: {reader.total / seconds:7,.0f} images/s; "
        f"{cpu_s / batches * 1e3:.2f} ms of CPU a batch; "
        f"read: busy {read.busy:4.0%}, {read.depth:4.1f} ready; "
        f"decode: busy {decode.busy:4.0%}, {decode.depth:3.1f} ready",
        flush=True,
    )


def main() -> None:
    """Print a line for each number of buffers and round."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--buffers", default="8,0", help="numbers of batches in memory (%(default)s)")
    parser.add_argument("--file-us", type=float, default=140.0, help="to read and check a file (%(default)s)")
    parser.add_argument("--decode-us", type=float, default=25.0, help="of the engines, for a picture (%(default)s)")
    parser.add_argument("--replay-us", type=float, default=28.5, help="of a replay, for a picture (%(default)s)")
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--count", type=int, default=16_384, help="pictures (%(default)s)")
    parser.add_argument("--claim-ms", type=float, default=0.0, help="of a claim of shards; 0: no claims (%(default)s)")
    parser.add_argument("--shard", type=int, default=2048, help="pictures in a shard that is claimed (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    program = PROGRAM.format(root=str(ROOT), file_s=asked.file_us / 1e6)
    decoders = Decoders(asked.processes, program=[sys.executable, "-P", "-c", program])
    with tempfile.TemporaryDirectory() as place, closing(decoders):
        picture = Path(place) / "picture.jpg"
        Image.new("RGB", (500, 375)).save(picture)
        folder = Path(place) / "in"
        folder.mkdir()
        for number in range(asked.count):
            os.link(picture, folder / f"{number:07}.jpg")
        transform = TransformSpec(resize=(224, 224), scale=1 / 255)
        spec = InputSpec(source=str(folder), format="images", batch_size=asked.batch, transform=transform)
        with closing(open_reader(spec)) as reader:
            reader.hire(decoders)
            for _ in range(asked.rounds):
                for buffers in asked.buffers.split(","):
                    run(reader, asked, int(buffers))


if __name__ == "__main__":
    main()
