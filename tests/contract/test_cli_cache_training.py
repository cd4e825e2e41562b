"""Commands about stored schedules, on those of a fine-tuning's step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from nimble_jobs.workloads.training.step import validation as validations
from tests.cli import Cli, beside
from tests.trainings import lay_out

SPEC = """
version: 1
name: net
kind: finetune
model: {source: "python:model.py:net"}
input: {source: train.npz, format: npz, fields: {x: images, label: labels}, batch_size: 8}
output: {path: out/net, if_exists: replace}
train: {accumulate: 2, loss: "python:losses.py:smooth", optimizer: {momentum: 0.9}}
run: {device: cpu}
"""
LOSS = """
from torch.nn.functional import cross_entropy


def smooth(outputs, y):
    return cross_entropy(outputs, y)
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """A small training with a loss of the user's own."""
    lay_out(tmp_path)
    (tmp_path / "losses.py").write_text(LOSS)
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    return path


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, spec: Path) -> Cli:
    return beside(spec, tmp_path / "home", capsys, monkeypatch)


def test_built_ahead_carried_and_found(cli: Cli, spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A build stores both rows, and the next job hits. They can be listed, shown, verified, carried and removed."""
    assert cli("cache", "why", spec, "--json").json["reason"] == "no schedule is stored under this key"
    (made,) = cli("cache", "build", spec, "--json").json
    assert (made["hit"], made["fallback"], made["input"]) == (False, None, "x:float32[8, 1, 8, 8], y:int64[8]")
    (again,) = cli("cache", "build", spec, "--json").json
    assert (again["hit"], again["key"], again["build_s"]) == (True, made["key"], made["build_s"])
    done = cli("run", spec, "--json").json
    assert (done["state"], done["schedule"]["hit"], done["schedule"]["key"]) == ("succeeded", "stored", made["key"])
    rows = cli("cache", "ls", "--filter", "mode=training", "--json").json
    assert sorted(row["hits"] for row in rows) == [2, 2]
    keys = [row["key"] for row in rows]
    assert made["key"] in keys
    shown = cli("cache", "show", made["key"], "--json").json
    assert (shown["mode"], shown["key_parts"]["train.program"]) == ("training", "update")
    verified = cli("cache", "verify", "--replay", "--json").json
    assert [(row["sound"], row["replayed"]) for row in verified] == [(True, False)] * 2
    assert {row["said"] for row in verified} == {"a training step is not replayed; its bytes were hashed"}
    assert cli("cache", "export", *keys, "steps.zip").code == 0
    other = Cli(spec.parent / "other", capsys)
    assert [each["taken"] for each in other("cache", "import", "steps.zip", "--json").json] == [True, True]
    assert other("cache", "why", spec, "--json").json["hit"] is True
    assert cli("cache", "rm", made["key"], "--yes").code == 0
    missed = cli("cache", "why", spec, "--json").json
    assert (missed["hit"], missed["key"]) == (False, made["key"])


def test_a_short_training_says_why_it_builds_nothing(cli: Cli, spec: Path) -> None:
    """In `show` and its events, which tell how to build. With `progressive: false` it builds first."""
    done = cli("run", spec, "--json").json
    shown = cli("show", done["id"], "--json").json
    assert (shown["schedule"]["runs"], cli("cache", "ls", "--json").json) == ("eager", [])
    assert shown["schedule"]["fallback"].startswith("building would not pay: 7 batches are too few; ")
    assert [event["message"] for event in shown["events"] if event["kind"] == "fallback"] == [
        f"runs in eager: {shown['schedule']['fallback']}"
    ]
    assert f"schedule.fallback: {shown['schedule']['fallback']}" in cli("show", done["id"]).out
    built = cli("run", spec, "schedule.progressive=false", "--json").json
    assert (built["schedule"]["hit"], built["schedule"]["fallback"]) == ("miss", None)
    assert len(cli("cache", "ls", "--json").json) == 2
    loaded = cli("run", spec, "--json").json
    assert loaded["schedule"]["hit"] == "stored"


def test_explained_with_both_programs(cli: Cli, spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules are looked up without running the user's code, then built, drawn and found, for both programs."""
    with monkeypatch.context() as strict:
        strict.delenv("NIMBLE_JOBS_ALLOW_PYTHON")
        missed = cli("explain", spec, "--no-build", "--json").json
        assert (missed["hit"], missed["accumulate"]["hit"]) == ("miss", "miss")
        assert "graph" not in missed
        refused = cli("explain", spec)
        assert (refused.code, "may not be run" in refused.err) == (2, True)
    made = cli("explain", spec, "--json", "--timeline", "step.svg").json
    assert (made["hit"], made["fallback"], made["key"]) == ("miss", None, missed["key"])
    assert (spec.parent / "step.svg").read_text().startswith("<svg")
    assert made["accumulate"]["key"] == missed["accumulate"]["key"] != made["key"]
    assert made["graph"]["tasks"] > made["accumulate"]["graph"]["tasks"] > 5
    found = cli("explain", spec, "--no-build", "--json").json
    assert (found["hit"], found["accumulate"]["hit"], found["graph"]) == ("stored", "stored", made["graph"])
    shown = cli("explain", spec).out
    assert "candidates.eager kernels, 1 and 1 streams" in shown
    assert f"batches without an update.tasks: {made['accumulate']['graph']['tasks']}" in shown


def test_validations_are_built_ahead_too(cli: Cli, spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules of validations are built ahead where they are replayed, so the job builds nothing."""
    monkeypatch.setattr(validations, "able", lambda _: SimpleNamespace(graphs=True))
    given = (spec, "train.validation.source=held-out.npz", "--json")
    step, validation = cli("cache", "build", *given).json
    assert (step["input"], validation["input"]) == ("x:float32[8, 1, 8, 8], y:int64[8]", "x:float32[8, 1, 8, 8]")
    assert (validation["hit"], validation["fallback"]) == (False, None)
    assert [row["hit"] for row in cli("cache", "build", *given).json] == [True, True]
    shown = cli("cache", "show", validation["key"], "--json").json
    assert (shown["mode"], shown["key_parts"]["train.program"]) == ("training", "validation")
    done = cli("run", *given, "schedule.on_miss=fail").json
    assert (done["state"], done["schedule"]["validation"]) == ("succeeded", "schedule")
    assert cli("cache", "why", *given).json["hit"] is True
    assert cli("cache", "rm", validation["key"], "--yes").code == 0
    missed = cli("cache", "why", *given).json
    assert (missed["hit"], missed["key"]) == (False, validation["key"])
    assert missed["reason"] == "validation: no schedule is stored under this key"


def test_validations_that_cannot_be_replayed_are_named(cli: Cli, spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build ahead says what the job would say, and does not report success."""
    model = spec.parent / "model.py"
    model.write_text(
        model.read_text()
        + """

class Reads(nn.Sequential):
    def forward(self, x):
        x = super().forward(x)
        return x if self.training else x * x.sum().sign().item()


def reads():
    return Reads(nn.Flatten(), nn.Linear(64, 4))
"""
    )
    monkeypatch.setattr(validations, "able", lambda _: SimpleNamespace(graphs=True))
    answer = cli("cache", "build", spec, "model.source=python:model.py:reads", "train.validation.source=held-out.npz")
    assert (answer.code, "jobs will run in eager: validations: " in answer.err) == (100, True)
    assert "model.py:" in answer.err


def test_why_names_what_differs(cli: Cli, spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An edited loss or frozen parameters make a miss, and another learning rate does not. No user code runs."""
    cli("cache", "build", spec)
    monkeypatch.delenv("NIMBLE_JOBS_ALLOW_PYTHON")
    assert cli("cache", "why", spec, "train.optimizer.lr=0.5", "train.epochs=7", "model.seed=3", "--json").json["hit"]
    frozen = cli("cache", "why", spec, "train.freeze=[0.*]", "--json").json
    assert [(d["part"], d["wanted"], d["stored"]) for d in frozen["differences"]] == [("train.freeze", '["0.*"]', "[]")]
    (spec.parent / "losses.py").write_text(LOSS.replace("(outputs, y)\n", "(outputs, y, label_smoothing=0.1)\n"))
    edited = cli("cache", "why", spec, "--json").json
    assert [d["part"] for d in edited["differences"]] == ["train.loss.file:losses.py"]
    assert edited["changed_files"] == ["losses.py"]
    assert "schedule.changed: file losses.py" in cli("cache", "why", spec).out


def test_build_refuses_code_that_may_not_run(cli: Cli, spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of a loss or a model that may not run is refused."""
    monkeypatch.delenv("NIMBLE_JOBS_ALLOW_PYTHON")
    refused = cli("cache", "build", spec)
    assert (refused.code, "may not be run" in refused.err) == (2, True)
