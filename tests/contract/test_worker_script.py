"""worker script slurm, kubernetes: what the command line adds to the text that it prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from nimble_jobs.cli.main import main
from tests.cli import Cli

POD = ["--image", "x/y:1", "--claim", "shared"]


@pytest.mark.parametrize("args", [["slurm"], ["kubernetes", *POD]])
def test_only_the_text_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
    """It goes to stdout, nothing to stderr, and no state folder is made."""
    answer = Cli(tmp_path / "home", capsys)("worker", "script", *args)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith("#")
    assert not (tmp_path / "home").exists()


def test_a_relative_state_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script runs elsewhere, so it has the whole path."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["--home", "../jobs", "worker", "script", "slurm"]) == 0
    assert f"export NIMBLE_JOBS_HOME={tmp_path.resolve() / 'jobs'}\n" in capsys.readouterr().out


def test_the_grace_period_is_that_of_the_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Workers elsewhere have no such file, so script and manifest name it."""
    (tmp_path / "home").mkdir(mode=0o700)
    (tmp_path / "home" / "config.yaml").write_text("version: 1\nlimits: {grace: 4m}\n")
    cli = Cli(tmp_path / "home", capsys)
    printed = cli("worker", "script", "slurm").out
    assert "export NIMBLE_JOBS_LIMITS_GRACE=4m\n" in printed
    assert "#SBATCH --signal=B:TERM@270\n" in printed
    assert "terminationGracePeriodSeconds: 270\n" in cli("worker", "script", "kubernetes", *POD).out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["slurm", "--time", "soon"], "--time: found 'soon'; expected seconds or a duration such as 90, 5s, 10m"),
        (["slurm", "--memory", "much"], "--memory: found 'much'; expected bytes or a size such as 512MiB or 20GB"),
        (["slurm", "--node-home", "x"], "--node-home: found 'x'; expected an absolute path"),
        (["kubernetes", "--claim", "shared"], "Missing option '--image'"),
        (["kubernetes", *POD, "--gpus", "99"], "--gpus: found 99; expected a whole number from 0 to 64"),
    ],
)
def test_bad_options_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    """It names the option and what was expected; nothing is printed that could be submitted."""
    answer = Cli(tmp_path / "home", capsys)("worker", "script", *args)
    assert (answer.code, answer.out, len(answer.lines)) == (2, "", 1)
    assert answer.err.startswith(f"nimble-jobs: {message}")
