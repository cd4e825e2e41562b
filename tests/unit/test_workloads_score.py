"""The score workload over readers and models that stand in for real ones."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nimble_jobs import spec as specs
from nimble_jobs.data import BadRecord, open_reader
from nimble_jobs.data.buffers import Buffers
from nimble_jobs.engine.arrivals import Arrivals, Arrived
from nimble_jobs.engine.flight import Landed
from nimble_jobs.engine.landings import Landings
from nimble_jobs.errors import DataError
from nimble_jobs.job import JobState
from nimble_jobs.patience import NONE
from nimble_jobs.planner import key_parts, schedule_key
from nimble_jobs.planner.module.limits import Limits
from nimble_jobs.spec import RunSpec
from nimble_jobs.spec.model import InputSpec
from nimble_jobs.store import open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.executor import execute, real_station
from nimble_jobs.worker.foreground import run_inline
from nimble_jobs.workloads.bad_records import BadRecords
from nimble_jobs.workloads.context import Stop
from nimble_jobs.workloads.cuts import cut
from nimble_jobs.workloads.parts import Lane
from nimble_jobs.workloads.record_feed import RecordFeed, upload
from nimble_jobs.workloads.request import request_of
from nimble_jobs.workloads.scoring import Scoring, Tally
from nimble_jobs.workloads.stages import Stages
from tests.store_samples import queued

READY_S = 0.01


class AllInFlight:
    """A model that takes every batch before it gives the first result, as many replays in flight do."""

    request = SimpleNamespace(batch_size=4, shape=(3,), preprocess=None)
    instances = ()
    arrivals = Arrivals((4, 3), torch.float32, torch.device("cpu"), in_flight=1)

    def __init__(self) -> None:
        self.made: list[Buffers] = []
        self.steps: list[str] = []

    def make_ready(self, head: Any) -> None:
        self.steps.append("ready")
        time.sleep(READY_S)

    def buffers(self, nbytes: int, _count: int) -> Buffers:
        self.steps.append("feed")
        self.made.append(Buffers(8, nbytes))
        return self.made[-1]

    def run(
        self, arrived: Iterable[tuple[Arrived | None, Any]], head: Any, landings: Landings
    ) -> Generator[Landed[Any]]:
        for batch, beside in list(arrived):
            yield Landed(outputs={} if batch is None else head({"output": batch.x}), beside=beside)

    def altered(self) -> None:
        return None


class Written:
    """In the place of a staging folder."""

    def __init__(self) -> None:
        self.done: dict[int, Any] = {}
        self.columns: Any = None
        self.bad: list[BadRecord] = []

    def write_shard(self, _index: int, columns: Any, bad: list[BadRecord], **_: Any) -> None:
        self.columns, self.bad = columns, bad


def context_of(spec: Any) -> Any:
    """Of a job that one worker scores on the CPU."""
    return SimpleNamespace(
        membership=None,
        spec=spec,
        device="cpu",
        stop=lambda: Stop.GO,
        report=lambda **_: None,
        patience=NONE,
        builders=None,
    )


@pytest.mark.parametrize(("threshold", "fails"), [(0.2, True), (0.25, False), (-1.0, False)])
def test_the_threshold_counts_batches_in_flight(tmp_path: Path, threshold: float, fails: bool) -> None:
    """Four bad records of sixteen, one a batch: more than a fifth, whenever the results come."""
    x = np.ones((16, 3), dtype=np.float32)
    x[::4] = np.nan
    np.save(tmp_path / "x.npy", x)
    spec = SimpleNamespace(output=SimpleNamespace(fields=["id"]), run=RunSpec(error_threshold=threshold))
    context = context_of(spec)
    model = AllInFlight()
    prepared: Any = SimpleNamespace(loaded=model, progress=None)
    tally, staging = Tally(), Written()
    with open_reader(InputSpec(source=str(tmp_path / "x.npy"), format="npy")) as reader:
        stages = Stages(context, alone=False)
        bounds = cut([(0, 16)], frozenset(), prepared.loaded.request.batch_size)
        bad = BadRecords(spec.run, 16, place=reader.place, report=context.report)
        feed = RecordFeed(reader, prepared.loaded, [bounds], stages, last=bounds[-1].shard, bad=bad, limits=Limits())
        lanes = [Lane(prepared=prepared)]
        scoring = Scoring(context, staging, feed, lanes, shards=[(0, 16)], tally=tally, stages=stages)  # type: ignore[arg-type]
        if fails:
            with pytest.raises(DataError, match=r"^4 of 16 records are bad"):
                scoring.run()
        else:
            summary = scoring.run()
            assert (len(staging.columns["id"]), len(staging.bad), tally.done, bad.count) == (12, 4, 16, 4)
            assert [stage["name"] for stage in summary["stages"]] == ["read and decode", "replay", "columns", "shards"]
        assert scoring.ready_s >= READY_S, "it counts as loading, not as running"
        assert model.steps == ["ready", "feed"], "a capture waits for the whole device: no thread uses it yet"


@pytest.mark.parametrize(("instances", "expected"), [((), [2, 2]), ((object(),), [4])])
def test_in_eager_each_shard_lands_before_the_next_is_begun(
    tmp_path: Path, instances: tuple[object, ...], expected: list[int]
) -> None:
    """For what the model carries into the next shard is looked at in between. A schedule knows that beforehand.

    Host memory for results is kept meanwhile.
    """
    np.save(tmp_path / "x.npy", np.ones((16, 3), dtype=np.float32))
    spec = SimpleNamespace(output=SimpleNamespace(fields=["id"]), run=RunSpec())
    context = context_of(spec)
    taken: list[int] = []
    used: set[Landings] = set()

    class Counting(AllInFlight):
        def run(
            self, arrived: Iterable[tuple[Arrived | None, Any]], head: Any, landings: Landings
        ) -> Generator[Landed[Any]]:
            found = list(arrived)
            taken.append(len(found))
            used.add(landings)
            return super().run(found, head, landings)

    model = Counting()
    model.instances = instances  # type: ignore[assignment]
    prepared: Any = SimpleNamespace(loaded=model, progress=None)
    shards = [(0, 8), (8, 16)]
    with open_reader(InputSpec(source=str(tmp_path / "x.npy"), format="npy")) as reader:
        stages = Stages(context, alone=False)
        bounds = cut(shards, frozenset(), model.request.batch_size)
        bad = BadRecords(spec.run, 16, place=reader.place, report=context.report)
        feed = RecordFeed(reader, prepared.loaded, [bounds], stages, last=bounds[-1].shard, bad=bad, limits=Limits())
        staging: Any = Written()
        scoring = Scoring(
            context, staging, feed, [Lane(prepared=prepared)], shards=shards, tally=Tally(), stages=stages
        )
        scoring.run()
    assert taken == expected
    assert len(used) == 1


def test_an_upload_is_waited_for_before_its_memory_is_let_go() -> None:
    """Also that of the last batch, and if the job ends early."""
    done: list[str] = []

    class Four:
        x = np.ones((4, 3))

        def __init__(self, name: str) -> None:
            self.name = name

        def __len__(self) -> int:
            return 4

        def release(self) -> None:
            done.append(f"{self.name} is free")

    def part(name: str) -> Any:
        return SimpleNamespace(batch=Four(name), lane=0)

    names = iter(["first", "second"] * 2)

    def uploaded(x: torch.Tensor) -> Arrived:
        name = next(names)
        ready: Any = SimpleNamespace(synchronize=lambda: done.append(f"{name} is there"))
        return Arrived(x=x, ready=ready)

    lanes: Any = [SimpleNamespace(arrivals=SimpleNamespace(upload=uploaded))]
    assert len(list(upload((part(name) for name in ("first", "second")), lanes))) == 2
    assert done == ["first is there", "first is free", "second is there", "second is free"]
    done.clear()
    early = upload((part(name) for name in ("first", "second")), lanes)
    next(early)
    assert not done
    early.close()
    assert done == ["first is there", "first is free"]


def tiny_job(folder: Path) -> dict[str, Any]:
    """The resolved spec of a job that takes milliseconds."""
    (folder / "model.py").write_text("import torch\ndef make():\n    return torch.nn.Linear(3, 2)\n")
    np.save(folder / "x.npy", np.ones((4, 3), dtype=np.float32))
    spec = {
        "version": 1,
        "name": "n",
        "kind": "score",
        "model": {"source": f"python:{folder}/model.py:make"},
        "input": {"source": str(folder / "x.npy"), "format": "npy", "batch_size": 4},
        "schedule": {"progressive": False},
        "output": {"path": str(folder / "out"), "fields": ["id"], "if_exists": "replace"},
    }
    return specs.dump(specs.restore(spec))


def test_a_resident_model_is_no_permission(tmp_path: Path) -> None:
    """A job from somebody who allowed nothing fails, though another's job left the model on the device."""
    resolved = tiny_job(tmp_path)
    with open_store(resolve(str(tmp_path / "home"))) as store:
        station = real_station(store, "w", "cpu", None)
        ended = []
        for folders in ([str(tmp_path)], []):
            job = queued(
                store, spec=resolved, name="n", kind="score", foreground=True, allow_python=folders, now=time.time()
            )
            ended.append(run_inline(store, job.id, station=station))
        station.residents.clear()
    assert [job.state for job in ended] == [JobState.SUCCEEDED, JobState.FAILED]
    assert "may not be run" in str(ended[1].error)


@pytest.mark.parametrize("end", ["release", "cancel"])
def test_a_job_waits_for_the_builder_of_its_schedule(tmp_path: Path, end: str) -> None:
    """It says so on the job, takes its turn when the builder is gone, and can be cancelled meanwhile."""
    resolved = tiny_job(tmp_path)
    with open_reader(InputSpec(source=str(tmp_path / "x.npy"), format="npy", batch_size=4)) as reader:
        request = request_of(specs.restore(resolved), reader, torch.device("cpu"), (tmp_path,))
    key = schedule_key(key_parts(request, torch.device("cpu")))
    with open_store(resolve(str(tmp_path / "home"))) as store, ThreadPoolExecutor(1) as pool:
        queued(store, spec=resolved, name="n", kind="score", allow_python=[str(tmp_path)], now=time.time())
        job = store.jobs.claim("w", device="cpu", now=time.time())
        assert job is not None
        with store.builds.turn(key, limit_s=0.0, waiting=lambda _: None):
            ended = pool.submit(execute, job, real_station(store, "w", "cpu", None))
            while store.jobs.get(job.id).phase != "wait":
                assert not ended.done()
                time.sleep(0.01)
            if end == "cancel":
                store.jobs.cancel(job.id, time.time())
                ended.result()
        ended.result()
        assert store.jobs.get(job.id).state is (JobState.CANCELLED if end == "cancel" else JobState.SUCCEEDED)
        (event,) = [e for e in store.jobs.events(job.id) if e.kind == "wait"]
        assert event.message == f"process {os.getpid()} is building this schedule; the job waits for at most 600 s"
