"""Metrics and traces of real workers: nothing that watches can disturb a job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from worker_fakes import submit
from worker_processes import Start, child_of, ended

from nimble_jobs.job import JobState
from nimble_jobs.metrics import Gpus
from nimble_jobs.store import Store, open_store
from tests import prefork
from tests.collector import collecting
from tests.configured import configure
from tests.metrics import NoDriver, counters, parsed, scraped, value
from tests.waiting import PATIENCE_S, until

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of spans leave at once."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "TRACEPARENT"):
        monkeypatch.delenv(name, raising=False)


def test_each_attempt_becomes_a_trace(
    store: Store, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that succeeded, failed, and lost their process; each with its own span."""
    monkeypatch.setenv("FAKES_LAST_TRACES_S", str(PATIENCE_S))
    with collecting() as collector:
        configure(store.home, f"tracing: {{endpoint: '{collector.url}'}}\n")
        fine = submit(store, tmp_path, name="fine", do="batches")
        dies = submit(store, tmp_path, name="dies", do="die", times=1)
        bad = submit(store, tmp_path, name="bad", do="raise", error="data")
        worker = start(idle=0.5)
        assert worker.wait(timeout=PATIENCE_S) == 0
        ended(store, fine, dies, bad)
        found = {
            (span.attributes["nimble_jobs.job.name"], span.attributes["nimble_jobs.attempt"]): span
            for span in collector.named("score attempt")
        }
        outcomes = {key: span.attributes["nimble_jobs.outcome"] for key, span in found.items()}
        assert outcomes[("fine", 1)] == "succeeded"
        assert (outcomes[("dies", 1)], outcomes[("dies", 2)]) == ("lost", "succeeded")
        assert "failed" in {outcome for (name, _), outcome in outcomes.items() if name == "bad"}
        assert found[("bad", 1)].error == "no such file"
        phases = {span.name for span in collector.spans if span.parent == found[("fine", 1)].id}
        assert phases >= {"claim", "run"}
        assert found[("fine", 1)].attributes["nimble_jobs.device"] == "cpu"


@pytest.mark.parametrize("trouble", ["gone", "hangs"])
def test_a_collector_in_trouble_delays_no_job(store: Store, start: Start, tmp_path: Path, trouble: str) -> None:
    """Twenty jobs flow, and the worker ends within seconds of its last job."""
    with collecting() as collector:
        collector.hang_s = 600.0
        url = "http://127.0.0.1:9" if trouble == "gone" else collector.url
        configure(store.home, f"tracing: {{endpoint: '{url}'}}\n")
        jobs = [submit(store, tmp_path, name=f"job-{i}", do="print") for i in range(20)]
        worker = start(idle=0.5)
        done = ended(store, *jobs)
        assert [job.state for job in done] == [JobState.SUCCEEDED] * 20
        if trouble == "hangs":
            until(lambda: collector.requests)
        assert worker.wait(timeout=PATIENCE_S) == 0  # the collector would take 600 s


def test_scrapes_while_a_worker_runs(store: Store, start: Start, tmp_path: Path) -> None:
    """Counters only grow, from the first job to the last, and the worker is seen at work."""
    gate = tmp_path / "gate"
    jobs = [submit(store, tmp_path, name=f"job-{i}", do="batches", count=5, gate=str(gate)) for i in range(10)]
    start()
    before: dict[object, float] = {}
    gpus = Gpus(NoDriver())
    with open_store(store.home) as mine:
        while True:  # until then the first job waits for being seen
            finished = all(mine.jobs.get(job.id).state.final for job in jobs)
            samples = scraped_while_it_changes(mine, gpus)
            assert all(samples[key] >= known for key, known in before.items())
            before = counters(samples)  # type: ignore[assignment]
            if value(samples, "workers", state="busy") == 1:
                gate.touch()
            if finished:
                break
            time.sleep(0.02)
        samples = until(
            lambda: (found := scraped(mine, time.time()))[("nimble_jobs_workers", (("state", "idle"),))] and found
        )
    assert value(samples, "records_done_total", kind="score") == sum(store.jobs.get(j.id).records_done for j in jobs)
    assert value(samples, "jobs_ended_total", kind="score", state="succeeded") == 10


def scraped_while_it_changes(store: Store, gpus: Gpus) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """One exposition; the two formats cannot be compared while a worker runs."""
    from nimble_jobs import metrics

    return parsed(metrics.exposition(store, gpus=gpus)[0].decode())


def test_a_textfile_is_whole_whenever_its_writer_is_killed(store: Store, tmp_path: Path) -> None:
    """Readers find the old text or the new one; SIGTERM ends the command with 0."""
    path = tmp_path / "nimble.prom"
    command = [sys.executable, "-m", "nimble_jobs.cli.main", "--home", str(store.home)]
    command += ["metrics", "--textfile", str(path), "--every", "1s"]
    with prefork.start(command, stderr=subprocess.PIPE, text=True) as process:
        until(path.exists)
        first = path.stat().st_mtime_ns
        until(lambda: path.stat().st_mtime_ns > first)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=PATIENCE_S) == 0
    rounds = int(os.environ.get("NIMBLE_JOBS_KILL_ROUNDS", "3"))
    writer = [sys.executable, "-c", _WRITE_FOR_EVER, str(path)]
    for _ in range(rounds):
        with prefork.start(writer, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "writing\n"
            for _ in range(200):
                assert path.read_text() in ("a" * 100_000, "b" * 100_000)
            process.kill()
            process.wait()
        assert path.read_text() in ("a" * 100_000, "b" * 100_000)
        assert path.stat().st_mode & 0o777 == 0o644


_WRITE_FOR_EVER = """
import itertools, sys
from pathlib import Path
from nimble_jobs.metrics.textfile import write_textfile
for n in itertools.count():
    write_textfile(Path(sys.argv[1]), b"ab"[n % 2 : n % 2 + 1] * 100_000, "--textfile")
    if not n:
        print("writing", flush=True)
"""


def test_a_stalled_job_is_seen(store: Store, start: Start, tmp_path: Path) -> None:
    """The seconds since its last progress grow."""
    job = submit(store, tmp_path, do="hang")
    worker = start()
    until(lambda: store.jobs.get(job.id).state is JobState.RUNNING)
    name = ("nimble_jobs_worker_stall_seconds", (("device", "cpu"), ("worker", "0")))
    first = until(lambda: scraped_while_it_changes(store, Gpus(NoDriver())).get(name))
    assert until(lambda: scraped_while_it_changes(store, Gpus(NoDriver()))[name] > first + 0.5)
    child_of(worker).kill()
