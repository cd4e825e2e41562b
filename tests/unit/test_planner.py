"""From a request to something that runs: built once, stored, resident; and every way in which it can go wrong."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nimble_jobs import planner
from nimble_jobs.engine import verify
from nimble_jobs.errors import CheckFailed, JobFailed, ModelChanged, OutOfMemory
from nimble_jobs.job import Hit
from nimble_jobs.planner import Builders, Prepared, Request, key_parts, schedule_key
from nimble_jobs.planner.jobs.ahead import build_ahead, look_up
from nimble_jobs.planner.lookup.why import why
from nimble_jobs.planner.module import carried
from nimble_jobs.spec import ModelSpec, ScheduleSpec
from nimble_jobs.store import ScheduleState, Store, open_store
from nimble_jobs.store.artifacts import Artifacts
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.residency import Residents
from tests.one_batch import outputs_of
from tests.waiting import PATIENCE_S

CPU = torch.device("cpu")
CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(3, width)

    def forward(self, x):
        return self.linear(x).relu() * torch.tensor([1.0, 2.0, 3.0, 4.0])

def net(width=4):
    return Net(width)

class Reads(nn.Module):
    def forward(self, x):
        return x * float(x.sum())

def reads():
    return Reads()
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home"))) as opened:
        yield opened


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(CODE)
    return path


def request(code: Path, factory: str = "net", *, batch: int = 2, **schedule: Any) -> Request:
    return Request(
        model=ModelSpec(source=f"python:{code}:{factory}"),
        shape=(3,),
        dtype="float32",
        batch_size=batch,
        schedule=ScheduleSpec(**schedule),
        allowed_python=(code.parent,),
    )


def prepared(wanted: Request, store: Store, residents: Residents | None = None) -> Prepared:
    return planner.prepare(wanted, device=CPU, store=store, residents=residents or Residents(2**30))


def outputs(made: Prepared, x: torch.Tensor) -> torch.Tensor:
    found = outputs_of(made.loaded, x)
    return found["output"]


def test_miss_then_resident_then_stored(store: Store, code: Path) -> None:
    """The first request builds, the next one in this process is resident, one in another process is a stored hit."""
    residents = Residents(2**30)
    first = prepared(request(code), store, residents)
    again = prepared(request(code), store, residents)
    elsewhere = prepared(request(code), store)
    assert [p.hit for p in (first, again, elsewhere)] == [Hit.MISS, Hit.RESIDENT, Hit.STORED]
    assert again.loaded is first.loaded
    x = torch.randn(2, 3)
    assert torch.equal(outputs(first, x), outputs(elsewhere, x))
    assert store.schedules.get(first.loaded.key).hits == 2
    uses = store.schedules.uses()
    assert (uses.resident, uses.stored, sum(uses.misses.values())) == (1, 1, 1)
    assert first.summary()["runs"] == elsewhere.summary()["runs"] == "schedule"


def test_weights_are_read_whole_only_before_the_model_is_called_in_eager(
    store: Store, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stored hit does not pay for it; a build does, and so does a job in eager."""
    read = []
    real = carried.fingerprints
    monkeypatch.setattr(carried, "fingerprints", lambda tensors: read.append(1) or real(tensors))
    for hit, times in ((Hit.MISS, 1), (Hit.STORED, 0)):
        assert prepared(request(code), store).hit is hit
        assert len(read) == times
        read.clear()
    prepared(request(code, "reads"), store)
    assert len(read) > 1  # before the build that refused it, and after


def test_the_key_is_equal_for_equal_requests_and_differs_with_what_matters(code: Path) -> None:
    """Batch size, factory arguments, dtype and the model's file change the key; the seed does not."""
    base = request(code)
    key = schedule_key(key_parts(base, CPU))
    assert key == schedule_key(key_parts(request(code), CPU))
    seeded = Request(**{**base.__dict__, "model": base.model.model_copy(update={"seed": 5})})
    assert schedule_key(key_parts(seeded, CPU)) == key
    others = [
        request(code, batch=3),
        request(code, "reads"),
        Request(**{**base.__dict__, "model": base.model.model_copy(update={"args": {"width": 4}})}),
        Request(**{**base.__dict__, "model": base.model.model_copy(update={"dtype": "bf16"})}),
        Request(**{**base.__dict__, "embedding": True}),
    ]
    keys = {schedule_key(key_parts(r, CPU)) for r in others}
    assert len(keys | {key}) == len(others) + 1
    code.write_text(CODE + "\n# edited\n")
    assert schedule_key(key_parts(request(code), CPU)) != key


def test_other_weights_are_served_by_the_same_schedule(store: Store, code: Path) -> None:
    """Another seed gives other weights, the stored schedule and eager's results."""
    prepared(request(code), store)
    base = request(code)
    seeded = Request(**{**base.__dict__, "model": base.model.model_copy(update={"seed": 5})})
    made = prepared(seeded, store)
    x = torch.randn(2, 3)
    assert made.hit is Hit.STORED
    with torch.no_grad():
        assert torch.allclose(outputs(made, x), made.loaded.module(x))


def test_a_model_that_cannot_be_recorded_runs_in_eager_and_says_why(store: Store, code: Path) -> None:
    """The fallback names the operator; nothing is stored."""
    made = prepared(request(code, "reads"), store)
    assert made.summary()["runs"] == "eager"
    assert "_local_scalar_dense" in str(made.loaded.fallback)
    x = torch.randn(2, 3)
    assert torch.equal(outputs(made, x), x * float(x.sum()))
    assert store.schedules.list() == []


def test_a_failed_check_quarantines_and_is_not_built_again(
    store: Store, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a mismatch the job runs in eager; so does the next one, without building."""

    def disagree(*_a: Any, **_k: Any) -> float:
        raise CheckFailed("output 'output' differs from eager", error=0.5)

    with monkeypatch.context() as patched:
        patched.setattr(verify, "check", disagree)
        made = prepared(request(code), store)
    assert made.loaded.fallback is not None
    assert "quarantined: output 'output' differs from eager" in made.loaded.fallback
    assert store.schedules.get(made.loaded.key).state == "quarantined"
    after = prepared(request(code), store)
    assert (after.summary()["runs"], after.hit) == ("eager", Hit.MISS)
    store.schedules.remove([made.loaded.key])
    assert prepared(request(code), store).summary()["runs"] == "schedule"


def test_a_stored_schedule_that_fails_its_check_is_quarantined_too(
    store: Store, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check follows each load, not only each build."""
    prepared(request(code), store)

    def disagree(*_a: Any, **_k: Any) -> float:
        raise CheckFailed("differs", error=None)

    with monkeypatch.context() as patched:
        patched.setattr(verify, "check", disagree)
        made = prepared(request(code), store)
    assert made.summary()["runs"] == "eager"
    assert made.miss_reason == "the stored schedule failed its check: differs"
    assert store.schedules.get(made.loaded.key).state == "quarantined"
    assert prepared(request(code), store).summary()["runs"] == "schedule"  # built anew, and it passes


def test_a_missing_constant_is_a_miss_with_its_reason(store: Store, code: Path) -> None:
    """Without the bytes of a constant the schedule is built again, and works."""
    first = prepared(request(code), store)
    assert first.loaded.schedule is not None
    (constant,) = first.loaded.schedule.program.constants
    for path in (store.home / "artifacts").rglob(f"*{constant.name[-20:]}*"):
        path.unlink()
    again = prepared(request(code), store)
    assert (again.hit, again.summary()["runs"]) == (Hit.MISS, "schedule")
    assert again.miss_reason is not None
    assert again.miss_reason.startswith("the stored schedule was not used: ")
    assert prepared(request(code), store).hit is Hit.STORED


@pytest.mark.parametrize("policy", ["eager", "fail"])
def test_on_miss_is_honoured(store: Store, code: Path, policy: str) -> None:
    """Without a stored schedule `eager` runs in eager, `fail` fails; with one both use it."""
    wanted = request(code, on_miss=policy)
    if policy == "fail":
        with pytest.raises(JobFailed, match=r"schedule\.on_miss is fail"):
            prepared(wanted, store)
    else:
        assert prepared(wanted, store).summary()["runs"] == "eager"
    prepared(request(code), store)
    assert prepared(wanted, store).hit is Hit.STORED


def test_a_job_in_eager_by_its_own_wish_does_not_bind_the_next(store: Store, code: Path) -> None:
    """on_miss: eager leaves nothing resident that a later job, which wants a schedule, would get."""
    residents = Residents(2**30)
    assert prepared(request(code, on_miss="eager"), store, residents).summary()["runs"] == "eager"
    assert prepared(request(code), store, residents).summary()["runs"] == "schedule"


def test_a_resident_whose_schedule_was_removed_or_set_aside_serves_no_more(store: Store, code: Path) -> None:
    """`cache rm`, and a quarantine by anybody, reach the workers that hold the graph."""
    residents = Residents(2**30)
    key = prepared(request(code), store, residents).loaded.key
    store.schedules.remove([key])
    assert prepared(request(code), store, residents).hit is Hit.MISS
    store.schedules.quarantine(key, "in doubt", 1.0)
    assert prepared(request(code), store, residents).hit is Hit.MISS
    assert prepared(request(code), store, residents).hit is Hit.RESIDENT


def test_removal_while_a_schedule_is_loaded_or_held_is_harmless(
    store: Store, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row may go at any moment. Its artifacts are deleted once they are read, and not before; whoever deletes them
    need not wait for capture and check.
    """
    key = prepared(request(code), store).loaded.key
    restoring = sys.modules["nimble_jobs.planner.forward.restore"]
    capture_several, get = restoring.capture_several, Artifacts.get
    order: list[str] = []

    def delete() -> None:
        with store.artifacts.alone():
            order.append("deleted")
            for name in store.artifacts.names():
                store.artifacts.remove(name)

    with ThreadPoolExecutor(1) as pool:
        deletions: list[Future[None]] = []

        def removed_meanwhile(artifacts: Artifacts, name: str) -> bytes:
            assert store.schedules.remove([key]) == 1
            deletions.append(pool.submit(delete))
            assert not wait(deletions, timeout=0.1).done
            order.append("read")
            return get(artifacts, name)

        def captured(*args: Any) -> Any:
            deletions[0].result(PATIENCE_S)
            order.append("captured")
            return capture_several(*args)

        with monkeypatch.context() as patched:
            patched.setattr(Artifacts, "get", removed_meanwhile)
            patched.setattr(restoring, "capture_several", captured)
            made = prepared(request(code), store)
    assert (made.hit, order) == (Hit.STORED, ["read", "deleted", "captured"])
    assert list(store.artifacts.names()) == []
    x = torch.randn(2, 3)
    with torch.no_grad():
        assert torch.equal(outputs(made, x), made.loaded.module(x))
    assert prepared(request(code), store).hit is Hit.MISS


def test_an_unschedulable_model_stays_resident_but_not_for_a_job_that_demands_a_schedule(
    store: Store, code: Path
) -> None:
    """It is loaded once; `on_miss: fail` fails all the same."""
    residents = Residents(2**30)
    first = prepared(request(code, "reads"), store, residents)
    assert prepared(request(code, "reads"), store, residents).loaded is first.loaded
    with pytest.raises(JobFailed):
        prepared(request(code, "reads", on_miss="fail"), store, residents)


def test_a_tolerance_has_its_own_schedule(store: Store, code: Path) -> None:
    """What one job's tolerance refuses is no other job's loss."""
    strict = request(code, tolerance=1e-12)
    assert schedule_key(key_parts(strict, CPU)) != schedule_key(key_parts(request(code), CPU))
    assert prepared(strict, store).summary()["tolerance"] == 1e-12


def test_a_limit_of_memory_reaches_the_search(store: Store, code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of it beside the weights bounds every candidate; a schedule that was found under it says so."""
    building = sys.modules["nimble_jobs.planner.forward.build"]
    build_best = building.build_best
    limits: list[int | None] = []

    def spied(module: Any, inputs: Any, key: str, options: Any, device: Any, **named: Any) -> Any:
        limits.append(options.memory_bytes)
        return build_best(module, inputs, key, options, device, **named)

    monkeypatch.setattr(building, "build_best", spied)
    weights = (3 * 4 + 4) * 4
    made = [prepared(replace(request(code), memory_bytes=limit), store) for limit in (None, 10**6, weights + 10**5)]
    assert limits == [None, 10**6 - weights, 10**5]
    assert len({m.loaded.key for m in made}) == 3
    assert {m.summary()["runs"] for m in made} == {"schedule"}
    small = prepared(replace(request(code), memory_bytes=weights + 10), store)
    assert small.summary()["runs"] == "eager"
    assert "its memory plan needs" in str(small.loaded.fallback)
    progressive = replace(request(code, progressive=True), memory_bytes=weights + 10)
    builders = Builders(store.home, command=("false",))
    quick = planner.prepare(progressive, device=CPU, store=store, residents=Residents(2**30), builders=builders)
    assert "its memory plan needs" in str(quick.loaded.fallback)


def test_a_device_that_is_full_fails_the_attempt(store: Store, code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one begins on an empty device; under a limit of the user's the job goes on in eager instead."""

    def full(*_args: Any, **_named: Any) -> None:
        raise OutOfMemory("no room")

    monkeypatch.setattr(sys.modules["nimble_jobs.planner.jobs.building"], "build_schedule", full)
    with pytest.raises(OutOfMemory):
        prepared(request(code), store)
    assert prepared(replace(request(code), memory_bytes=10**6), store).loaded.fallback is not None


def test_room_is_made_before_a_stored_schedule_is_captured(store: Store, code: Path) -> None:
    """For the weights and what the schedule was measured to need; the budget is not overrun meanwhile."""
    first = prepared(request(code), store)
    assert first.loaded.schedule is not None
    wanted: list[int] = []

    class Watched(Residents):
        def drop(self, key: str) -> None:
            raise AssertionError

        def make_room(self, nbytes: int) -> None:
            wanted.append(nbytes)
            super().make_room(nbytes)

    made = prepared(request(code), store, Watched(2**30))
    weights = (3 * 4 + 4) * 4
    assert wanted == [weights, weights + first.loaded.schedule.peak_bytes]
    assert made.loaded.bytes == weights + sum(i.bytes for i in made.loaded.instances)


def test_explain_builds_once_and_counts_as_the_paper_does(store: Store, code: Path) -> None:
    """syncs_needed is meg_edges - matching; exactly one candidate is chosen; the second answer is a hit."""

    def explained(batch: int = 2, *, build: bool = True) -> dict[str, Any]:
        wanted = request(code, batch=batch, on_miss="fail")
        return planner.explain_schedule(wanted, device=CPU, store=store, build=build, say=told.append)[0]

    told: list[str] = []
    answer = explained()
    graph = answer["graph"]
    assert graph["syncs_needed"] == graph["meg_edges"] - graph["matching"]
    kernels = ("eager kernels", "oneDNN kernels over packed weights")
    assert sum(c["chosen"] for c in answer["candidates"]) == 1
    tried = [f"trying {each}{plan}" for each in kernels for plan in ("", ", 1 stream")]
    assert told == ["loading the model", "measuring eager", *tried]
    told.clear()
    again = explained()
    assert (answer["hit"], again["hit"], told) == ("miss", "stored", [])
    assert set(answer["stages"]) == {
        f"{n}_s" for n in ("load", "record", "plan", "capture", "check", "measure", "build")
    }
    assert all(seconds >= 0 for seconds in answer["stages"].values())
    memory = answer["memory"]
    assert memory["arena_floor_bytes"] <= memory["arena_bytes"] <= memory["arena_without_reuse_bytes"]
    assert {n: v for n, v in again.items() if n not in ("hit", "miss_reason", "stages")} == {
        n: v for n, v in answer.items() if n not in ("hit", "miss_reason", "stages")
    }
    assert explained(7, build=False)["hit"] == "miss"
    uses = store.schedules.uses()
    assert (uses.stored, sum(uses.misses.values())) == (0, 1), "a miss counts where it leads to a build"


def test_a_job_reports_the_candidate_that_is_tried(store: Store, code: Path) -> None:
    """While a schedule is built the phase stays `build`, and the schedule's part of the report names the candidate."""
    reports: list[dict[str, Any]] = []
    planner.prepare(
        request(code),
        device=CPU,
        store=store,
        residents=Residents(2**30),
        report=lambda **values: reports.append(values),
    )
    assert reports[:2] == [{"phase": "load"}, {"phase": "build"}]
    last = "oneDNN kernels over packed weights, 1 stream"
    assert reports[-1] == {"phase": "build", "schedule": {"trying": last}}


def test_explain_says_why_jobs_run_in_eager(store: Store, code: Path) -> None:
    """A model that no schedule can hold is an answer, the same as a job's, and a schedule that fails its check too."""
    wanted = request(code, "reads")
    answer, schedule = planner.explain_schedule(wanted, device=CPU, store=store)
    assert schedule is None
    assert answer["fallback"] == prepared(wanted, store).loaded.fallback
    assert answer["fallback"].startswith("no schedule could be built: ")
    assert sum(store.schedules.uses().misses.values()) == 2


@pytest.fixture
def helper(code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module on the import path from which the model takes a factor."""
    folder = tmp_path / "path"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    path = folder / "factor_on_the_path.py"
    path.write_text("factor = 2.0\n")
    code.write_text(
        "import torch, factor_on_the_path\nclass Net(torch.nn.Module):\n    def forward(self, x):\n"
        "        return x * factor_on_the_path.factor\n\ndef net():\n    return Net()\n"
    )
    yield path
    sys.modules.pop("factor_on_the_path", None)


def test_nothing_is_stored_of_code_that_is_no_longer_there(store: Store, code: Path, helper: Path) -> None:
    """An edit of a module that this process has imported ends in an error, not in a schedule of the old code under the
    new key; a process that has not imported it builds the new one.
    """
    prepared(request(code), store)
    helper.write_text("factor = 2.0005\n")
    with pytest.raises(ModelChanged, match="factor_on_the_path"):
        prepared(request(code), store)
    assert len(store.schedules.list()) == 1
    del sys.modules["factor_on_the_path"]
    importlib.invalidate_caches()
    made = prepared(request(code), store)
    assert made.hit is Hit.MISS
    assert torch.equal(outputs(made, torch.ones(2, 3)), torch.full((2, 3), 2.0005))


def test_code_that_is_edited_while_it_is_built_is_not_stored(
    store: Store, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key was made of the files as they were before."""
    module = sys.modules["nimble_jobs.planner.jobs.building"]
    built = module.build_schedule

    def edited(*args: Any, **options: Any) -> Any:
        code.write_text(CODE.replace("4.0]", "4.5]"))
        return built(*args, **options)

    monkeypatch.setattr(module, "build_schedule", edited)
    with pytest.raises(ModelChanged, match=r"model\.file:net\.py"):
        prepared(request(code), store)
    assert store.schedules.list() == []


@pytest.fixture
def damage(store: Store, code: Path) -> str:
    """The schedule of the model is stored, but its constant is gone: the key."""
    made = prepared(request(code), store)
    (name,) = store.artifacts.names()
    store.artifacts.remove(name)
    return made.loaded.key


@pytest.mark.parametrize("asked", ["why", "look_up"])
def test_an_artifact_that_is_gone_is_a_miss_for_whoever_asks(store: Store, code: Path, damage: str, asked: str) -> None:
    """Not for jobs alone: what says hit is what a job loads. The schedule is quarantined; the next job builds it."""
    if asked == "why":
        found = why(request(code), device=CPU, store=store)
        hit, reason = found.hit, found.reason
    else:
        answer = look_up(request(code), device=CPU, store=store)
        hit, reason = answer.hit is Hit.STORED, answer.miss_reason
    assert not hit
    assert "the stored schedule was not used: artifact" in (reason or "")
    assert "is not stored" in (reason or "")
    assert store.schedules.get(damage).state is ScheduleState.QUARANTINED
    assert prepared(request(code), store).hit is Hit.MISS


def test_building_ahead_mends_what_is_damaged(store: Store, code: Path, damage: str) -> None:
    """It would be a miss of the next job's."""
    built = build_ahead(request(code), device=CPU, store=store)
    assert (built.key, built.hit, built.fallback) == (damage, False, None)
    assert prepared(request(code), store).hit is Hit.STORED


def test_what_is_built_ahead_counts_whether_it_was_there_or_not(store: Store, code: Path) -> None:
    """A miss and a hit, each once; and what is kept up so was used, so that pruning by age spares it."""
    key = build_ahead(request(code), device=CPU, store=store).key
    before = store.schedules.get(key)
    build_ahead(request(code), device=CPU, store=store)
    uses = store.schedules.uses()
    after = store.schedules.get(key)
    assert (uses.stored, sum(uses.misses.values())) == (1, 1)
    assert after.hits == before.hits + 1
    assert after.last_used_at > before.last_used_at
    look_up(request(code), device=CPU, store=store)
    assert store.schedules.get(key).hits == after.hits
