"""Plain eager is a candidate: where a replay is slower by more than the noise, the module itself runs, and says so."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nimble_jobs import Nimble
from nimble_jobs import spec as specs
from nimble_jobs.engine import capture, measure
from nimble_jobs.errors import UsageError
from nimble_jobs.job import Job, JobState
from nimble_jobs.planner.forward.build import Built, build_best
from nimble_jobs.planner.keys.options import BuildOptions
from nimble_jobs.planner.search.contest import Contest
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.executor import real_station
from nimble_jobs.worker.foreground import run_inline
from nimble_jobs.workloads import Stop
from tests.cli import beside
from tests.clocks import Clock
from tests.store_samples import queued
from tests.trainings import Attempt, digests, lay_out, spec_of

CPU = torch.device("cpu")
SLOW_S = 0.03  # added to each replay: many times what eager takes by the clock of these tests


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(resolve(str(tmp_path / "home"))) as opened:
        yield opened


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager may win, as it may outside of tests."""
    monkeypatch.setenv("NIMBLE_JOBS_EAGER", "candidate")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """By which candidates are timed."""
    found = Clock()
    monkeypatch.setattr(measure, "time", found)
    return found


@pytest.fixture
def slow(counts: None, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replays take long. Notes each."""
    replays: list[str] = []
    fast = capture._CallInstance.replay

    def replay(self: capture._CallInstance) -> None:
        replays.append("replay")
        clock.sleep(SLOW_S)
        fast(self)

    monkeypatch.setattr(capture._CallInstance, "replay", replay)
    return replays


def built(**options: Any) -> Built:
    torch.manual_seed(0)
    return build_best(nn.Linear(3, 2).eval(), {"x": torch.zeros(2, 3)}, "key", BuildOptions(**options), CPU)


@pytest.mark.parametrize(
    ("eager", "replay", "noise", "wins"),
    [
        ([10.0] * 3, [9.0] * 3, 0.02, False),
        ([10.0] * 3, [10.1] * 3, 0.02, False),
        ([10.0] * 3, [10.3] * 3, 0.02, True),
        ([9.0, 10.0, 11.0], [10.3] * 3, 0.05, False),
        ([9.0, 10.0, 11.0], [10.6] * 3, 0.05, True),
        ([5.0, 10.0, 15.0], [6.0, 11.5, 20.0], 0.10, True),
        ([10.0], [10.1], 0.02, False),
    ],
)
def test_a_replay_must_be_slower_by_more_than_the_noise(
    eager: list[float], replay: list[float], noise: float, wins: bool
) -> None:
    """The noise is what the samples scatter by, at least 2 percent, and at most 10: noise excuses no more than that."""
    found = Contest.of(eager, replay)
    assert found.noise == pytest.approx(noise)
    assert found.eager_wins is wins


def test_the_outcome_of_a_search_may_be_eager(slow: list[str]) -> None:
    """The schedule says that eager runs, with both times and the noise; nothing is captured for it."""
    found = built()
    schedule = found.schedule
    assert (schedule.runs, found.instances, found.failure) == ("eager", (), None)
    assert schedule.replay_us > SLOW_S * 1e6 > schedule.eager_us
    assert schedule.noise is not None
    eager, single = schedule.candidates
    assert (eager.chosen, single.chosen) == (True, False)
    assert eager.reason.startswith(
        f"the reference; runs because {single.name} is slower, by more than the measurement noise of "
    )
    assert single.reason.endswith("of the candidates that passed their check; slower than eager")
    assert type(schedule).from_json(schedule.to_json()) == schedule


def test_a_schedule_can_be_asked_for_although_eager_is_faster(slow: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the option or the variable eager is the reference alone; another word is refused."""
    assert built(eager="reference").schedule.runs == "schedule"
    monkeypatch.setenv("NIMBLE_JOBS_EAGER", "reference")
    assert built().schedule.runs == "schedule"
    monkeypatch.setenv("NIMBLE_JOBS_EAGER", "maybe")
    with pytest.raises(UsageError, match=r"^NIMBLE_JOBS_EAGER: found 'maybe'; expected 'candidate' or 'reference'$"):
        built()


@pytest.mark.usefixtures("counts")
def test_what_replays_faster_is_replayed(clock: Clock) -> None:
    """A module that spends its time in Python is replayed, and eager is timed no second time."""

    class Waits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            clock.sleep(SLOW_S)
            return x + 1

    found = build_best(Waits().eval(), {"x": torch.zeros(2)}, "key", BuildOptions(), CPU)
    assert (found.schedule.runs, found.schedule.noise) == ("schedule", None)
    assert len(found.instances) == 1


@pytest.mark.parametrize("training", [False, True])
def test_nimble_calls_the_module_where_that_is_faster(slow: list[str], training: bool) -> None:
    """Outputs and gradients are the module's; `schedule.runs` says it, and it is no fallback. Nothing is replayed."""
    net, x = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), torch.randn(4, 3)
    twin = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    twin.load_state_dict(net.state_dict())
    with Nimble(net) as nimble:
        nimble.prepare(x, training=training)
        assert nimble.schedule is not None
        assert (nimble.schedule.runs, nimble.fallback) == ("eager", None)
        assert (nimble.backward_schedule is not None) is training
        slow.clear()
        found = nimble(x)
        expected = twin.train(training)(x)
        torch.testing.assert_close(found, expected if training else expected.detach())
        if training:
            found.sum().backward()
            expected.sum().backward()
            torch.testing.assert_close(net[0].weight.grad, twin[0].weight.grad)
        with pytest.raises(UsageError, match=r"^there is nothing to replay: this signature runs in eager, which is"):
            nimble.replay()
        assert slow == []
        assert all(m.training for m in net.modules())
        nimble.prepare(x, training=training, eager="reference")
        assert nimble.schedule.runs == "schedule"
        nimble(x)
        assert slow


def test_nimble_finds_in_the_store_that_eager_is_faster(slow: list[str], store: Store) -> None:
    """The second `prepare` neither searches nor captures."""
    net, x = nn.Linear(3, 2).eval(), torch.randn(4, 3)
    Nimble(net).prepare(x, store=store)
    slow.clear()
    nimble = Nimble(net)
    nimble.prepare(x, store=store)
    assert nimble.hit.value == "stored"
    assert nimble.schedule is not None
    assert nimble.schedule.runs == "eager"
    torch.testing.assert_close(nimble(x), net(x).detach())
    assert slow == []


def test_outputs_of_a_module_that_is_called_are_the_callers_to_keep(slow: list[str]) -> None:
    """A module that returns its own buffer and its input gives copies of them, as a replay does."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"seen": self.seen, "x": x, "y": x * 2}

    net, x = Sums().eval(), torch.ones(3)
    nimble = Nimble(net)
    nimble.prepare(x)
    assert nimble.schedule is not None
    assert nimble.schedule.runs == "eager"
    found = nimble(x)
    net.seen.add_(1)
    x.add_(1)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {"seen": [0] * 3, "x": [1] * 3, "y": [2] * 3}


def score(store: Store, folder: Path, *, progressive: bool = False) -> tuple[Job, list[str]]:
    """A scoring job, run to its end, and what it said of its schedule."""
    (folder / "model.py").write_text("import torch\ndef make():\n    return torch.nn.Linear(3, 2)\n")
    np.save(folder / "x.npy", np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32))
    spec = {
        "version": 1,
        "name": "n",
        "kind": "score",
        "model": {"source": f"python:{folder}/model.py:make"},
        "input": {"source": str(folder / "x.npy"), "format": "npy", "batch_size": 4},
        "schedule": {"progressive": progressive},
        "output": {"path": str(folder / "out"), "format": "npy", "fields": ["id", "logits"], "if_exists": "replace"},
    }
    job = queued(
        store,
        spec=specs.dump(specs.restore(spec)),
        name="n",
        kind="score",
        foreground=True,
        allow_python=[str(folder)],
        now=time.time(),
    )
    ended = run_inline(store, job.id, station=real_station(store, "w", "cpu", None))
    assert ended.state is JobState.SUCCEEDED, ended.error
    return ended, [e.message for e in store.jobs.events(job.id) if e.kind in ("schedule", "fallback")]


def test_a_job_runs_the_module_and_the_next_one_finds_that(slow: list[str], store: Store, tmp_path: Path) -> None:
    """The outcome is stored: the second job searches nothing, captures nothing, and says the same with both figures."""
    first, (said,) = score(store, tmp_path)
    assert (first.schedule["hit"], first.schedule["runs"], first.schedule["fallback"]) == ("miss", "eager", None)
    assert first.schedule["eager_is_faster"] is True
    assert "; eager is faster here: " in said
    assert first.schedule["replay_us"] > SLOW_S * 1e6 > first.schedule["eager_us"]
    before = [np.load(file) for file in sorted((tmp_path / "out").glob("*logits*"))]
    slow.clear()
    second, (said,) = score(store, tmp_path)
    assert (second.schedule["hit"], second.schedule["runs"], second.schedule["fallback"]) == ("stored", "eager", None)
    assert said.startswith("stored ")
    assert "; eager is faster here: " in said
    assert slow == []
    after = [np.load(file) for file in sorted((tmp_path / "out").glob("*logits*"))]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    (entry,) = store.schedules.list()
    assert (entry.runs, entry.hits) == ("eager", 1)


def test_a_progressive_job_begins_in_eager_where_that_is_faster(slow: list[str], store: Store, tmp_path: Path) -> None:
    """What is quick to build is not used where it is slower than the module."""
    job, said = score(store, tmp_path, progressive=True)
    assert (job.schedule["runs"], job.schedule["fallback"]) == ("eager", None)
    assert any("eager is faster here" in each for each in said)


def test_a_training_runs_plain_steps_where_they_are_faster(slow: list[str], tmp_path: Path) -> None:
    """Stored with its schedules, found by the next training, and equal to one that replays, bit for bit."""
    lay_out(tmp_path)

    def train(output: str) -> Any:
        changes = {"model__args": {"dropout": 0.0}, "train__epochs": 1, "train__validation": None}
        attempt = Attempt(spec_of(tmp_path, output=f"{output}/net", **changes), job=output, home=tmp_path / "home")
        return attempt.run(), attempt

    first, told = train("first")
    assert (first.schedule["hit"], first.schedule["runs"], first.schedule["fallback"]) == ("miss", "eager", None)
    assert "eager is faster here" in told.said("schedule")[0]
    slow.clear()
    second, told = train("second")
    assert (second.schedule["hit"], second.schedule["runs"], second.schedule["fallback"]) == ("stored", "eager", None)
    assert second.schedule["eager_is_faster"] is True
    assert "eager is faster here" in told.said("schedule")[0]
    assert slow == []
    assert digests(tmp_path / "first/net") == digests(tmp_path / "second/net")


def test_commands_say_that_eager_is_faster(
    slow: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cache build`, `explain`, `cache ls`, `cache show` and `show` say it with both figures; `verify --replay` and
    `export` with `import` take it as any other.
    """
    (tmp_path / "net.py").write_text("from torch import nn\n\n\ndef net():\n    return nn.Linear(4, 3)\n")
    np.save(tmp_path / "x.npy", np.zeros((6, 4), dtype=np.float32))
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        'version: 1\nname: net\nkind: score\nmodel: {source: "python:net.py:net"}\n'
        "input: {source: x.npy, format: npy, batch_size: 2}\n"
        "output: {path: out, format: npy, fields: [id, top1]}\nrun: {device: cpu}\n"
    )
    cli = beside(spec, tmp_path / "home", capsys, monkeypatch)
    assert "eager is faster here: replay " in cli("cache", "build", spec).out
    (made,) = cli("cache", "build", spec, "--json").json
    assert (made["hit"], made["runs"]) == (True, "eager")
    assert "eager is faster here: replay " in cli("explain", spec).out
    assert cli("explain", spec, "--json").json["runs"] == "eager"
    (row,) = cli("cache", "ls", "--json").json
    assert row["runs"] == "eager"
    listed = cli("cache", "ls")
    assert "\teager\t" in listed.out
    assert f"eager is faster here ({row['key'][:12]}): eager " in listed.err
    assert "eager is faster here: replay " in cli("cache", "show", row["key"]).out
    job = cli("run", spec, "--json").json
    assert (job["schedule"]["hit"], job["schedule"]["runs"]) == ("stored", "eager")
    assert "eager is faster here: replay " in cli("show", job["id"]).out
    assert "stored hit" in cli("show", job["id"]).out
    assert cli("cache", "verify", "--replay").code == 0
    assert cli("cache", "export", row["key"], tmp_path / "out.zip").code == 0
    assert cli("cache", "rm", row["key"], "--yes").code == 0
    assert cli("cache", "import", tmp_path / "out.zip", "--yes").code == 0
    assert [row["runs"] for row in cli("cache", "ls", "--json").json] == ["eager"]


def test_a_bundle_that_names_neither_is_refused(slow: list[str], store: Store) -> None:
    """What runs is one of two words."""
    schedule = replace(built().schedule, runs="both")
    from nimble_jobs.planner.lookup.transfer import _check_choice, _Refused

    with pytest.raises(_Refused, match=r"runs is 'both'; expected 'schedule' or 'eager'$"):
        _check_choice(schedule)


def test_a_training_that_chose_eager_goes_on_in_eager(slow: list[str], tmp_path: Path) -> None:
    """A second attempt finds the choice in the store: a hit, exact, and no fallback."""
    lay_out(tmp_path)

    def attempt(output: str, number: int, **options: Any) -> Attempt:
        changes = {"model__args": {"dropout": 0.0}, "train__epochs": 1, "train__validation": None}
        spec = spec_of(tmp_path, output=f"{output}/net", **changes)
        return Attempt(spec, job=output, home=tmp_path / "home", number=number, **options)

    attempt("whole", 1).run()
    stopped = attempt("parts", 1, stop=lambda asked: Stop.DRAIN if asked >= 3 else Stop.GO).run()
    assert stopped.stop is Stop.DRAIN
    second = attempt("parts", 2)
    outcome = second.run()
    assert (outcome.schedule["hit"], outcome.schedule["runs"], outcome.schedule["fallback"]) == (
        "stored",
        "eager",
        None,
    )
    (said,) = [data for kind, _, data in second.events if kind == "resumed"]
    assert said["exact"] is True
    assert digests(tmp_path / "whole/net") == digests(tmp_path / "parts/net")
