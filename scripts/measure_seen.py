"""What jobs that score only what is new pay for the files that were scored earlier: time, memory and bytes.

    python scripts/measure_seen.py [--files 1000000] [--real 100000] [--folder DIR]

Each step runs in a process of its own, whose peak memory is told. `--real` files are made on disk.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nimble_jobs.data.listing import list_input
from nimble_jobs.seen import InputFile, Kind, Scored, kind_of
from nimble_jobs.spec.model import InputSpec
from nimble_jobs.store import NewJob, open_store
from nimble_jobs.store.home import DATABASE, resolve

_NOW = 1.8e9
_NEW = 1000  # files that are not seen yet, of each measurement


class Files(Sequence[InputFile]):
    """Made when they are asked for."""

    def __init__(self, first: int, last: int) -> None:
        self._range = range(first, last)

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, i: Any) -> Any:
        n = self._range[i]
        return InputFile(path=f"2026/11/{n % 30:02}/camera-{n:07}.jpg", size=n, mtime_ns=n * 10**9)

    def __iter__(self) -> Iterator[InputFile]:
        return (self[i] for i in range(len(self)))


class Watch:
    """Seconds on the wall, and on a processor, since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> str:
        """Both, as text."""
        return f"{time.perf_counter() - self._wall:.3g} s, {time.process_time() - self._cpu:.3g} s on a processor"


def mark(folder: Path, count: int) -> str:
    """One job has scored all files, and succeeds."""
    with open_store(resolve(str(folder / "home"))) as store:
        job = store.jobs.queue(NewJob(spec={}, name="n", kind="score"), _NOW)
        store.jobs.claim("w", device="cpu", now=_NOW)
        scored = Scored(root="/in", model="0" * 64, listed_at=_NOW, after_run=0, files=Files(0, count))
        watch = Watch()
        store.jobs.finish(job.id, 1, outputs={}, timings={}, schedule={}, scored=scored, now=_NOW)
        took = watch.read()
    return f"{took}, database {(folder / 'home' / DATABASE).stat().st_size / 2**20:.0f} MiB"


def compare(folder: Path, count: int) -> str:
    """The next job finds the files that are new among them."""
    with open_store(resolve(str(folder / "home"))) as store:
        watch = Watch()
        kinds = Counter(
            kind_of(file, seen, model="0" * 64, settle_s=60, changed="rescore", model_change="new", now=_NOW)
            for file, seen in store.seen.compare("n", "/in", Files(0, count + _NEW))
        )
        took = watch.read()
    assert kinds == {Kind.SKIPPED: count, Kind.NEW: _NEW}, kinds
    return took


def add(folder: Path, count: int) -> str:
    """And marks these when it succeeds."""
    with open_store(resolve(str(folder / "home"))) as store:
        job = store.jobs.queue(NewJob(spec={}, name="n", kind="score"), _NOW)
        store.jobs.claim("w", device="cpu", now=_NOW)
        scored = Scored(root="/in", model="0" * 64, listed_at=_NOW, after_run=1, files=Files(count, count + _NEW))
        watch = Watch()
        store.jobs.finish(job.id, 1, outputs={}, timings={}, schedule={}, scored=scored, now=_NOW)
        return watch.read()


def forget(folder: Path, count: int) -> str:
    """Everything is forgotten again."""
    with open_store(resolve(str(folder / "home"))) as store:
        watch = Watch()
        assert store.seen.forget("n", now=_NOW) == count + _NEW
        return watch.read()


def listing(folder: Path, count: int) -> str:
    """Files on disk are listed: each one is looked at once."""
    (folder / "in").mkdir()
    for n in range(count):
        (folder / "in" / f"{n:07}.png").touch()
    watch = Watch()
    assert sum(1 for _ in list_input(InputSpec(source=str(folder / "in"), format="images"))) == count
    return watch.read()


def _measured(work: Callable[[Path, int], str], folder: Path, count: int) -> str:
    said = work(folder, count)
    return f"{said}, peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB"


def main() -> None:
    """Print a line for each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--real", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, default=None)
    given = parser.parse_args()
    steps = {mark: given.files, compare: given.files, add: given.files, forget: given.files, listing: given.real}
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        for work, count in steps.items():
            context = multiprocessing.get_context("spawn")
            with context.Pool(1) as pool:
                print(
                    f"{work.__name__:8} {count:>9,}: {pool.apply(_measured, (work, Path(folder), count))}", flush=True
                )


if __name__ == "__main__":
    main()
