"""What the measuring scripts share: where figures come from, and how they are kept."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import importlib.util
import json
import os
import platform
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("nimble-jobs", "torch", "torchvision", "triton", "numpy", "pyarrow")


def commit() -> str | None:
    """The commit of this checkout, `+` if it was changed; None outside of one."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or None


def environment(**more: Any) -> dict[str, Any]:
    """Machine, load, versions, commit and date. `more` says what else decides the figures, such as `device`."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "machine": f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "load": round(os.getloadavg()[0], 1),  # of everything that runs here
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "versions": versions,
        "commit": commit(),
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        **more,
    }


def in_words(made: dict[str, Any]) -> str:
    """An environment as the last line of a page."""
    software = f"Python {made['python']}, SQLite {made['sqlite']}, commit {made['commit']}"
    return f"{made['date']}, {made['machine']}; {software}."


def save(path: Path | None, found: Any) -> None:
    """Write JSON, if there is a path."""
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n")


def cli(home: Path, *words: str, env: dict[str, str] | None = None) -> str:
    """Standard output of one nimble-jobs command. Raises CalledProcessError if it fails."""
    command = [sys.executable, "-m", "nimble_jobs.cli.main", "--home", str(home), *words]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | (env or {}))
    return done.stdout


@contextmanager
def compiled_python(run: Callable[[str], object] | None = None) -> Iterator[None]:
    """Processes that are started inside find compiled modules: without, a start takes two to three times as long.

    Where torch was installed without, they are kept in a folder that is removed at the end. `run` makes a process, over
    a home, that imports all of them; without `run`, what is started first inside is not to be counted.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.cached is not None and Path(torch.cached).is_file():
        yield
        return
    with tempfile.TemporaryDirectory(prefix="nimble-jobs-") as folder:
        os.environ["PYTHONPYCACHEPREFIX"] = f"{folder}/compiled"
        if run is not None:
            home = Path(folder, "home")
            home.mkdir()
            run(str(home))
        yield


def summary(times_ms: Sequence[float], digits: int = 3) -> dict[str, Any]:
    """Median, 99th percentile and longest of times in milliseconds."""
    ordered = sorted(times_ms)
    at = min(len(ordered) - 1, int(len(ordered) * 0.99))
    return {
        "calls": len(ordered),
        "median_ms": round(statistics.median(ordered), digits),
        "p99_ms": round(ordered[at], digits),
        "longest_ms": round(ordered[-1], digits),
    }


Times = list[tuple[float, float]]  # of each call, in ms: wall time, time on a processor


def timed(call: Callable[[Any], object], values: Iterable[Any]) -> Times:
    """How long each call took."""
    times = []
    for value in values:
        start, used = time.perf_counter(), time.process_time()
        call(value)
        times.append(((time.perf_counter() - start) * 1e3, (time.process_time() - used) * 1e3))
    return times


def row(what: str, times: Times) -> dict[str, Any]:
    """A line of the table."""
    used = summary([u for _, u in times])
    return {
        "what": what,
        **summary([w for w, _ in times]),
        "processor_median_ms": used["median_ms"],
        "processor_p99_ms": used["p99_ms"],
    }
