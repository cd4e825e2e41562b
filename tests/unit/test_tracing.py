"""Attempts as traces: what a span says, and that no collector can delay or fail anything."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nimble_jobs import client, queue
from nimble_jobs.errors import NimbleError
from nimble_jobs.job import Attempt, Job, JobState
from nimble_jobs.settings import Settings
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.tracing import Target, attempt_span, submitter_traceparent, target_of, valid_traceparent
from nimble_jobs.worker import foreground
from nimble_jobs.worker.executor import Station
from nimble_jobs.worker.foreground import run_inline
from nimble_jobs.worker.residency import Residents
from nimble_jobs.worker.tracing import Trace
from nimble_jobs.workloads.context import Outcome
from tests.collector import collecting
from tests.configured import configure
from tests.store_samples import NOW, submit
from tests.timers import spec_of
from tests.waiting import PATIENCE_S, until

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
SECRET = "hunter2"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of this machine; batches leave at once."""
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "TRACEPARENT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home"))) as opened:
        yield opened


def ended(store: Store, *, error: str | None = None, **values: Any) -> Job:
    """A job that waited 5 s, ran for 10 s through four phases, and succeeded or failed."""
    spec = {
        "name": "a",
        "model": {"source": "torchvision:resnet18", "args": {"token": SECRET}},
        "input": {"source": f"/home/{SECRET}"},
    }
    job = submit(store, spec=spec, now=NOW - 5, max_attempts=1, **values)
    assert store.jobs.claim("0-w", device="cpu", now=NOW) is not None
    begun = [("load", 1), ("build", 2), ("run", 5), ("publish", 9)]
    timings = {"records_per_s": 40.0, "phases": [{"phase": name, "at": NOW + at} for name, at in begun]}
    schedule = {"hit": "miss", "runs": "schedule"}
    store.jobs.progress(job.id, 1, done=160, total=160, bad=1, timings=timings, schedule=schedule)
    if error is None:
        store.jobs.finish(job.id, 1, outputs={"path": SECRET}, timings=timings, schedule=schedule, now=NOW + 10)
    else:
        store.jobs.fail(job.id, 1, error=error, retry=False, now=NOW + 10)
    return store.jobs.get(job.id)


def test_a_span_says_what_the_attempt_did(store: Store) -> None:
    """Its phases follow each other from the claim to the end; nothing of the spec but the model's source is in it."""
    job = ended(store)
    span = attempt_span(job, store.jobs.attempts(job.id), 1, device="cpu")
    assert span is not None
    assert (span.name, span.start_s, span.end_s, span.error) == ("score attempt", NOW, NOW + 10, None)
    assert span.attributes == {
        "nimble_jobs.job.id": job.id,
        "nimble_jobs.job.name": "a",
        "nimble_jobs.job.kind": "score",
        "nimble_jobs.attempt": 1,
        "nimble_jobs.outcome": "succeeded",
        "nimble_jobs.model.source": "torchvision:resnet18",
        "nimble_jobs.device": "cpu",
        "nimble_jobs.queue_wait_s": 5.0,
        "nimble_jobs.hit": "miss",
        "nimble_jobs.runs": "schedule",
        "nimble_jobs.records": 160,
        "nimble_jobs.records_bad": 1,
        "nimble_jobs.records_per_s": 40.0,
    }
    phases = [(child.name, child.start_s - NOW, child.end_s - NOW) for child in span.children]
    assert phases == [("claim", 0, 1), ("load", 1, 2), ("build", 2, 5), ("run", 5, 9), ("publish", 9, 10)]
    assert SECRET not in repr(span)


def test_an_error_is_its_first_line(store: Store) -> None:
    """The rest of it stays in the job's log."""
    job = ended(store, error=f"out of memory\n{SECRET}")
    span = attempt_span(job, store.jobs.attempts(job.id), 1)
    assert span is not None
    assert span.error == "out of memory"
    assert span.attributes["nimble_jobs.outcome"] == "failed"


def test_an_attempt_before_the_last_one(store: Store) -> None:
    """It has its times and outcome, not the results of the newer one, whose waiting began when it ended."""
    job = ended(store)
    first = store.jobs.attempts(job.id)[0]
    attempts = [first, Attempt(job_id=job.id, number=2, worker="w", started_at=NOW + 30, finished_at=NOW + 31,
                               outcome="succeeded", error=None)]  # fmt: skip
    newer = replace(job, attempt=2)
    early, late = attempt_span(newer, attempts, 1), attempt_span(newer, attempts, 2)
    assert early is not None
    assert late is not None
    assert (early.children, "nimble_jobs.records" in early.attributes) == ((), False)
    assert late.attributes["nimble_jobs.queue_wait_s"] == 20
    assert late.children == ()  # the phases that were noted belong to the attempt before
    assert attempt_span(newer, attempts, 3) is None
    unended = replace(first, finished_at=None)
    assert attempt_span(job, [unended], 1) is None


@pytest.mark.parametrize("phases", [None, "x", [1], [{"phase": 1, "at": 2}], [{"phase": "run", "at": "x"}]])
def test_damaged_phases(store: Store, phases: object) -> None:
    """The span has no children then."""
    job = ended(store)
    span = attempt_span(replace(job, timings={"phases": phases}), store.jobs.attempts(job.id), 1)
    assert span is not None
    assert span.children == ()


@pytest.mark.parametrize(
    ("environ", "endpoint", "expected"),
    [
        ({}, None, None),
        ({}, "http://c:4318/", Target(endpoint="http://c:4318/v1/traces")),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://d"}, None, Target(endpoint=None)),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://d/x"}, None, Target(endpoint=None)),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://d"}, "http://c", Target(endpoint="http://c/v1/traces")),
        ({"OTEL_SDK_DISABLED": "TRUE"}, "http://c", None),
        ({"OTEL_TRACES_EXPORTER": "none"}, "http://c", None),
    ],
)
def test_where_traces_go(environ: dict[str, str], endpoint: str | None, expected: Target | None) -> None:
    """Nowhere by default; to tracing.endpoint first, and then to where OpenTelemetry's variables say."""
    settings = Settings.model_validate({"tracing": {"endpoint": endpoint}})
    assert target_of(settings, environ) == expected


def test_traceparents() -> None:
    """Only the standard's form is kept, since a collector would refuse or misread any other."""
    assert submitter_traceparent({"TRACEPARENT": f" {PARENT} "}) == PARENT
    assert submitter_traceparent({}) is None
    for wrong in (
        "",
        "x",
        PARENT.upper(),
        PARENT[:-1],
        f"01{PARENT[2:]}",
        f"00-{'0' * 32}-{PARENT[36:]}",
        PARENT + "\n0",
    ):
        assert not valid_traceparent(wrong)
        assert submitter_traceparent({"TRACEPARENT": wrong}) is None


def test_an_attempt_arrives(store: Store) -> None:
    """With its phases below it, below the submitter's span, and under our name."""
    job = ended(store, traceparent=PARENT)
    with collecting() as collector:
        configure(store.home, f"tracing: {{endpoint: '{collector.url}'}}\n")
        trace = Trace(store)
        trace.over(job, "cpu")
        trace.finish(PATIENCE_S)
        assert collector.paths == {"/v1/traces"}
        (attempt,) = collector.named("score attempt")
        assert (attempt.trace, attempt.parent) == (PARENT[3:35], PARENT[36:52])
        assert (attempt.start_ns, attempt.end_ns) == (int(NOW * 1e9), int((NOW + 10) * 1e9))
        assert attempt.attributes["nimble_jobs.device"] == "cpu"
        assert attempt.resource["service.name"] == "nimble-jobs"
        phases = [span for span in collector.spans if span.parent == attempt.id]
        assert [span.name for span in phases] == ["claim", "load", "build", "run", "publish"]
        assert {span.trace for span in phases} == {attempt.trace}
        assert SECRET not in repr(collector.spans)


def test_the_usual_variables(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """They name the collector, the service, and more of the resource."""
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test,service.name=mine")
        trace = Trace(store)
        trace.over(ended(store, error="no"))
        trace.finish(PATIENCE_S)
        (attempt,) = collector.named("score attempt")
        assert attempt.error == "no"
        assert attempt.resource["service.name"] == "mine"
        assert attempt.resource["deployment.environment"] == "test"


def test_an_unsampled_parent(store: Store) -> None:
    """The submitter decided that this trace is not wanted."""
    job = ended(store, traceparent=f"{PARENT[:-1]}0")
    with collecting() as collector:
        configure(store.home, f"tracing: {{endpoint: '{collector.url}'}}\n")
        trace = Trace(store)
        trace.over(job)
        trace.finish(PATIENCE_S)
        assert collector.requests == 0


def test_without_a_target_nothing_is_kept(store: Store) -> None:
    """Neither attempts nor a connection."""
    trace = Trace(store)
    trace.over(ended(store))
    trace.run(NOW)
    assert len(trace._over) == 0
    assert trace._tracer is None


@pytest.mark.parametrize("trouble", ["gone", "hangs", "fails", "closes"])
def test_a_collector_in_trouble(
    store: Store, trouble: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The duty returns while nothing has arrived; the end waits no longer than it may, and says what was lost."""
    job = ended(store)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    with collecting() as collector:
        url = collector.url
        collector.hang_s = 60.0 if trouble == "hangs" else 0.0
        collector.status = 500 if trouble == "fails" else 200
        collector.closes = trouble == "closes"
        if trouble == "gone":
            url = "http://127.0.0.1:9"
        configure(store.home, f"tracing: {{endpoint: '{url}'}}\n")
        trace = Trace(store)
        for _ in range(5):
            trace.over(job)
        trace.run(NOW)
        assert collector.spans == []
        with caplog.at_level(logging.WARNING):
            trace.finish(0.2 if trouble == "hangs" else PATIENCE_S)
        assert collector.spans == []
    if trouble == "hangs":
        assert "traces were dropped, because their collector did not take them within 0.2 s" in caplog.text


def test_a_collector_that_comes_back(store: Store) -> None:
    """Later attempts arrive."""
    job = ended(store)
    with collecting() as collector:
        configure(store.home, f"tracing: {{endpoint: '{collector.url}'}}\n")
        collector.status = 400  # which is final, unlike 503
        trace = Trace(store)
        trace.over(job)
        trace.run(NOW)
        until(lambda: collector.requests)
        collector.status = 200
        trace.over(job)
        trace.finish(PATIENCE_S)
        assert len(collector.named("score attempt")) == 1


def test_attempts_that_are_recorded_late(store: Store) -> None:
    """An end that the full store could not take yet is waited for; a job that was removed is left out."""
    job = submit(store, now=NOW)
    store.jobs.claim("w", device="cpu", now=NOW)
    running = store.jobs.get(job.id)
    with collecting() as collector:
        configure(store.home, f"tracing: {{endpoint: '{collector.url}'}}\n")
        trace = Trace(store)
        trace.over(replace(running, id="nobody000000"))
        trace.over(running)
        trace.run(NOW)
        assert len(trace._over) == 1
        store.jobs.finish(job.id, 1, outputs={}, timings={}, schedule={}, now=NOW + 1)
        trace.finish(PATIENCE_S)
        assert [span.name for span in collector.spans] == ["score attempt"]


def test_an_attempt_that_ends_while_it_is_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its phases are sent with it, or the attempt is sent later."""
    job = submit(store, now=NOW)
    store.jobs.claim("w", device="cpu", now=NOW)
    running, get = store.jobs.get(job.id), store.jobs.get

    def finishes(name: str) -> Job:
        found = get(name)
        timings = {"phases": [{"phase": "run", "at": NOW + 1}]}
        store.jobs.finish(job.id, 1, outputs={}, timings=timings, schedule={}, now=NOW + 2)
        return found

    with collecting() as collector:
        configure(store.home, f"tracing: {{endpoint: '{collector.url}'}}\n")
        trace = Trace(store)
        trace.over(running)
        monkeypatch.setattr(store.jobs, "get", finishes)
        trace.run(NOW)
        monkeypatch.setattr(store.jobs, "get", get)
        trace.finish(PATIENCE_S)
        assert sorted(span.name for span in collector.spans) == ["claim", "run", "score attempt"]


def test_without_the_extra(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The duty says what to install, which `worker ls` then shows; jobs go on."""
    monkeypatch.setitem(__import__("sys").modules, "nimble_jobs.tracing.tracer", None)
    configure(store.home, "tracing: {endpoint: 'http://localhost:4318'}\n")
    trace = Trace(store)
    trace.over(ended(store))
    with pytest.raises(NimbleError, match=r"pip install 'nimble-jobs\[opentelemetry\]'"):
        trace.run(NOW)


def test_the_submitter_s_trace_is_kept(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a job and for each of an array; a malformed TRACEPARENT is ignored."""
    spec = spec_of(tmp_path).model_copy(update={"cron": None})
    monkeypatch.setenv("TRACEPARENT", PARENT)
    assert client.submit(spec, store=store).traceparent == PARENT
    others = [spec.model_copy(update={"output": spec.output.model_copy(update={"path": tmp_path / n})}) for n in "ab"]
    assert [job.traceparent for job in queue.submit_array(others, store=store).jobs] == [PARENT, PARENT]
    monkeypatch.setenv("TRACEPARENT", "not-a-trace")
    assert client.submit(spec, store=store).traceparent is None


@pytest.mark.parametrize("up", [True, False])
def test_a_run_in_the_foreground(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, up: bool) -> None:
    """Its attempt is sent before the command ends; if the collector is gone, the job has succeeded all the same."""
    job = client.submit(spec_of(tmp_path).model_copy(update={"cron": None}), store=store, foreground=True)
    with collecting() as collector:
        url = collector.url if up else "http://127.0.0.1:9"
        configure(store.home, f"tracing: {{endpoint: '{url}'}}\n")
        if up:
            monkeypatch.setattr(foreground, "_TRACES_S", PATIENCE_S)
        station = Station(store=store, device="cpu", residents=Residents(1), run=lambda _context: Outcome())
        assert run_inline(store, job.id, station=station).state is JobState.SUCCEEDED
        assert len(collector.named("score attempt")) == up
