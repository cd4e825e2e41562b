#!/usr/bin/env python3
"""How long a GPU takes to decode a batch of JPEGs while it also computes, and what that costs the computation.

    python scripts/measure_decoding.py [--batch 64] [--threads 1,2] [--step-ms 14] [--photos DIR] [--json FILE]

A training's step keeps all multiprocessors busy, and its pictures are decoded meanwhile. Here products in a CUDA graph
stand for the step. For each number of threads, and for no load, a load on the default stream and one on a stream of its
own, a line gives: milliseconds for a batch in one thread, in the engines' calls, and from the resize until the memory
is blank again; pictures a second in all threads; and how much longer a step takes than without decoding. On a CPU there
is no load. Takes a minute on an H200.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import environment, save

from nimble_jobs.bench.scoring import photos
from nimble_jobs.decoding.do import left_encoded
from nimble_jobs.decoding.recipe import Recipe
from nimble_jobs.engine import streams
from nimble_jobs.engine.jpeg_engines import JpegEngines
from nimble_jobs.engine.pictures import PictureDecoder
from nimble_jobs.pictures import Pictures

SIDE, SECONDS = 224, 3.0
RECIPE = Recipe(channels=3, resize=(SIDE, SIDE), center_crop=None, size=(SIDE, SIDE))
NAMES = ("whole", "engines", "resize and blank")


class Load:
    """Products in a graph that takes about `step_ms`, launched one after another, two ahead."""

    def __init__(self, stream: torch.cuda.Stream, step_ms: float) -> None:
        self._stream = stream
        left = torch.randn(8192, 8192, device=stream.device, dtype=torch.float16)
        out = torch.empty_like(left)
        once = self._captured(left, out, 4)
        single_ms = self.step_ms(once, 20) / 4
        self.graph = self._captured(left, out, max(1, round(step_ms / single_ms)))

    def _captured(self, left: torch.Tensor, out: torch.Tensor, count: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        torch.mm(left, left, out=out)
        torch.cuda.synchronize()
        with streams.borrowed(left.device) as stream, torch.cuda.graph(graph, stream=stream):
            for _ in range(count):
                torch.mm(left, left, out=out)
        return graph

    def step_ms(self, graph: torch.cuda.CUDAGraph, count: int) -> float:
        """Milliseconds of one step without anything else."""
        with torch.cuda.stream(self._stream):
            graph.replay()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                graph.replay()
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3 / count

    @contextmanager
    def running(self) -> Iterator[list[float]]:
        """Inside, steps run; the list gets the time when each was over, but for the last ones."""
        stop, times = threading.Event(), list[float]()

        def run() -> None:
            with torch.cuda.stream(self._stream):
                over: list[torch.cuda.Event] = []
                while not stop.is_set():
                    self.graph.replay()
                    over.append(torch.cuda.Event())
                    over[-1].record()
                    if len(over) > 2:
                        over.pop(0).synchronize()
                        times.append(time.perf_counter())

        thread = threading.Thread(target=run)
        thread.start()
        time.sleep(0.2)
        times.clear()
        try:
            yield times
        finally:
            stop.set()
            thread.join()
            torch.cuda.synchronize()


def batch_of(encoded: Sequence[bytes], recipe: Recipe) -> Pictures:
    """These JPEGs as one batch."""
    headers = [h for one in encoded if (h := left_encoded(one, recipe)) is not None]
    ends = np.cumsum([len(one) for one in encoded])
    return Pictures(
        data=np.frombuffer(bytearray(b"".join(encoded)), dtype=np.uint8),
        spans=np.array([(end - len(one), len(one)) for end, one in zip(ends, encoded, strict=True)]),
        sizes=np.array([(h.height, h.width) for h in headers], dtype=np.int32),
        alike=np.array([h.alike for h in headers]),
    )


def timed(owner: type, name: str, into: list[float]) -> Callable[[], None]:
    """Note what each call of a method takes, in milliseconds; the result puts the method back."""
    original = getattr(owner, name)

    def call(*given: Any, **more: Any) -> Any:
        start = time.perf_counter()
        try:
            return original(*given, **more)
        finally:
            into.append((time.perf_counter() - start) * 1e3)

    setattr(owner, name, call)
    return lambda: setattr(owner, name, original)


def decoded(device: torch.device, batches: list[Pictures], threads: int) -> dict[str, float]:
    """Decode for a while in so many threads; medians of milliseconds, and pictures a second."""
    cuda, shape = device.type == "cuda", (len(batches[0]), SIDE, SIDE, 3)
    spent: dict[str, list[float]] = {name: [] for name in NAMES}
    done = itertools.count()
    begin = threading.Barrier(threads + 1)

    def work(first: int) -> None:
        mine = itertools.cycle(batches[first:] + batches[:first])
        stream = streams.take(device, urgent=True) if cuda else None
        with closing(PictureDecoder(device, RECIPE)) as decoder, torch.cuda.stream(stream):
            decoder.decode(batches[first], torch.empty(shape, dtype=torch.uint8, device=device))
            begin.wait()
            while time.perf_counter() < end:
                out = torch.empty(shape, dtype=torch.uint8, device=device)
                after = None if stream is None else stream.record_event()
                if decoder.decode(next(mine), out, after=after):
                    raise RuntimeError("a picture could not be decoded")
                next(done)

    methods = ((PictureDecoder, "decode"), (JpegEngines, "decode"), (PictureDecoder, "_left_out"))
    back = [timed(owner, name, spent[what]) for (owner, name), what in zip(methods, NAMES, strict=True)]
    end = time.perf_counter() + 1e9  # until all have begun
    with ThreadPoolExecutor(threads) as pool:
        working = [pool.submit(work, number) for number in range(threads)]
        begin.wait()
        for values in spent.values():
            values.clear()
        start = time.perf_counter()
        end = start + SECONDS
        for each in working:
            each.result()
    seconds = time.perf_counter() - start
    for put_back in back:
        put_back()
    found = {f"{name}, ms": round(statistics.median(values), 3) for name, values in spent.items() if values}
    return found | {"pictures/s": round(next(done) * len(batches[0]) / seconds)}


def main() -> None:
    """Print a line of JSON for each load and number of threads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--step-ms", type=float, default=14.0)
    parser.add_argument("--photos", type=Path, help="a folder of photographs to make JPEGs from")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device = torch.device(given.device)
    with tempfile.TemporaryDirectory() as folder:
        found = photos.sources(given.photos)
        names = tuple(path.name for path in found)
        recipe = photos.Recipe(count=8 * given.batch, width=500, height=375, photos=names)
        files = photos.provide(Path(folder) / "photos", recipe, found, lambda _text: None)
        encoded = [path.read_bytes() for path in files]
        batches = [batch_of(encoded[i : i + given.batch], RECIPE) for i in range(0, len(encoded), given.batch)]
    loads: dict[str, Load | None] = {"none": None}
    if device.type == "cuda":
        loads["default stream"] = Load(torch.cuda.default_stream(device), given.step_ms)
        loads["own stream"] = Load(streams.take(device), given.step_ms)
    rows = []
    for name, load in loads.items():
        for threads in map(int, given.threads.split(",")):
            row: dict[str, Any] = {"load": name, "threads": threads, "batch": given.batch}
            if load is None:
                row |= decoded(device, batches, threads)
            else:
                alone_ms = load.step_ms(load.graph, 20)
                with load.running() as times:
                    row |= decoded(device, batches, threads)
                each_ms = (times[-1] - times[0]) * 1e3 / (len(times) - 1) if len(times) > 1 else float("nan")
                row |= {"step alone, ms": round(alone_ms, 2), "step, ms": round(each_ms, 2)}
            rows.append(row)
            print(json.dumps(row), flush=True)
    if given.json:
        save(given.json, {"environment": environment(device=given.device), "results": rows})


if __name__ == "__main__":
    main()
