"""What stays beside an output when its job is over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nimble_jobs.data import hidden
from nimble_jobs.job import Job, JobState
from nimble_jobs.store import open_store
from nimble_jobs.store.home import resolve
from tests.cli import Cli
from tests.store_samples import NOW, queued

ENDED = [state for state in JobState if state.final and state is not JobState.SUCCEEDED]


def job_of(path: Path, state: JobState, job_id: str = "abc", kind: str = "finetune") -> Job:
    given: dict[str, Any] = dict.fromkeys(
        ("key", "timeout_s", "worker", "started_at", "finished_at", "records_total", "phase", "error")
    )
    counts: dict[str, Any] = dict.fromkeys(("priority", "records_done", "records_bad"), 0)
    return Job(
        id=job_id,
        name="n",
        kind=kind,
        state=state,
        attempt=1,
        max_attempts=3,
        device="cpu",
        foreground=False,
        after=(),
        not_before=0.0,
        cancel_requested=False,
        created_at=0.0,
        spec={"output": {"path": str(path)}},
        **given,
        **counts,
    )


def fill(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


@pytest.mark.parametrize("state", ENDED)
def test_checkpoints_stay_and_are_named(tmp_path: Path, state: JobState) -> None:
    """The same training can go on from them; what the job left half written goes."""
    root = tmp_path / ".out.training" / "0123"
    fill(root, "step-00000002/checkpoint.json", ".tmp-abc-step-00000004-1/model.safetensors")
    fill(tmp_path, ".out.abc/attempt-1/part", ".out.abc.writable")
    told = hidden.tidy(job_of(tmp_path / "out", state), tmp_path / "home")
    assert told == (
        "checkpoints-kept",
        f"{root} is kept: the same training, submitted again, resumes from it; remove the folder to start over",
    )
    assert sorted(p.name for p in root.iterdir()) == ["step-00000002"]
    assert [p.name for p in tmp_path.iterdir()] == [".out.training"]


@pytest.mark.parametrize("state", ENDED)
def test_a_training_without_a_checkpoint_leaves_nothing(tmp_path: Path, state: JobState) -> None:
    """Neither half of one, nor damaged ones, nor those that no other job may go on from (`resume: never`)."""
    fill(tmp_path / ".out.training", "0123/.tmp-abc-step-00000004-1/model.safetensors", "0123/damaged-00000002/x")
    fill(tmp_path / ".out.training", "0123-abc/step-00000002/checkpoint.json")
    assert hidden.tidy(job_of(tmp_path / "out", state), tmp_path / "home") is None
    assert list(tmp_path.iterdir()) == []


def test_other_jobs_keep_what_is_theirs(tmp_path: Path) -> None:
    """A job of the same training may be at work, and one that may run again is not over."""
    fill(tmp_path, ".out.training/0123/.tmp-other-step-00000004-1/model.safetensors", ".out.other/attempt-1/part")
    assert hidden.tidy(job_of(tmp_path / "out", JobState.FAILED), tmp_path / "home") is None
    fill(tmp_path, ".out.abc/attempt-1/part")
    for state in (JobState.QUEUED, JobState.RUNNING):
        assert hidden.tidy(job_of(tmp_path / "out", state), tmp_path / "home") is None
    assert sorted(p.name for p in tmp_path.iterdir()) == [".out.abc", ".out.other", ".out.training"]


def test_what_cannot_be_removed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job says so, and how it ended stands."""

    def refuse(*_: Any) -> None:
        raise OSError(30, "Read-only file system")

    fill(tmp_path, ".out.abc/attempt-1/part")
    monkeypatch.setattr(hidden.publish, "remove", refuse)
    told = hidden.tidy(job_of(tmp_path / "out", JobState.FAILED, kind="score"), tmp_path / "home")
    assert told is not None
    assert told[0] == "left-behind"
    assert told[1].endswith(".out.abc: cannot be written: Read-only file system")


def test_what_is_left(tmp_path: Path) -> None:
    """Of jobs that ended, and not what another job with the same output is using."""
    done, other = job_of(tmp_path / "out", JobState.FAILED), job_of(tmp_path / "out", JobState.RUNNING, "busy")
    fill(tmp_path, ".out.abc/x", ".out.abc.writable", ".out.training/0123/x", ".out.busy/x")
    names = [".out.abc", ".out.abc.writable", ".out.training"]
    assert [p.name for p in hidden.left([done])] == names
    assert [p.name for p in hidden.left([done, other])] == names[:2]


def test_doctor_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the job, and how to remove it; the machine is well all the same."""
    home = resolve(str(tmp_path / "home"))
    path = tmp_path / "my out"
    with open_store(home) as store:
        queued(store, spec={"output": {"path": str(path)}}, name="n", kind="score", now=NOW)
        job = store.jobs.claim("w", device="cpu", now=NOW)
        assert job is not None
        store.jobs.fail(job.id, 1, error="no", retry=False, lost=False, now=NOW)
    left = tmp_path / f".my out.{job.id}"
    left.mkdir()
    answer = Cli(home, capsys)("doctor", "--no-device")
    expected = f"note\tleft\t{left}: left by job {job.id} (failed), never published; remove it with: rm -r '{left}'"
    assert expected in answer.out.splitlines()
    assert answer.code == 0
