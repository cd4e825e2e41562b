"""Many jobs at once from Python."""

from __future__ import annotations

from pathlib import Path

import pytest

import nimble_jobs
from nimble_jobs.errors import SpecError, UsageError
from nimble_jobs.job import JobState
from nimble_jobs.spec import load
from tests.bad_specs import SCORE, lay_out


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    lay_out(tmp_path)
    path = tmp_path / "job.yaml"
    path.write_text(SCORE)
    return path


def test_a_grid(spec: Path, tmp_path: Path) -> None:
    """Values of any type, as they are; the array's id stands for its jobs."""
    home = tmp_path / "home"
    grid = {"input.batch_size": [32, 64], "model.args": [{"num_classes": 10}, {"num_classes": 2}]}
    array = nimble_jobs.submit_array(spec, grid=grid, overrides=["output.path=out/{{ index }}"], home=home)
    found = [(job.spec["input"]["batch_size"], job.spec["model"]["args"]["num_classes"]) for job in array.jobs]
    assert found == [(32, 10), (32, 2), (64, 10), (64, 2)]
    assert all(job.held for job in nimble_jobs.hold(array.id, home=home))
    assert not any(job.held for job in nimble_jobs.release(array.id, home=home))


def test_specs(spec: Path, tmp_path: Path) -> None:
    """Specs that are loaded already; two may not have one output."""
    home = tmp_path / "home"
    one, other = load(spec), load(spec, ["output.path=elsewhere"])
    with pytest.raises(
        SpecError, match=r"job 1 \(digits-score\): output.path: .* is the output of job 0 \(digits-score\)"
    ):
        nimble_jobs.submit_array([one, one], home=home)
    array = nimble_jobs.submit_array([one, other], priority=4, home=home)
    assert [(job.priority, job.state) for job in array.jobs] == [(4, JobState.QUEUED)] * 2
    with pytest.raises(UsageError, match="no specs to submit"):
        nimble_jobs.submit_array([], home=home)
    with pytest.raises(UsageError, match="a JobSpec is final"):
        nimble_jobs.submit_array([one], overrides=["name=x"], home=home)
    with pytest.raises(UsageError, match="expected ids, or failed=True"):
        nimble_jobs.retry(home=home)
