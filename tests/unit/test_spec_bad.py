"""Every mistake of the table gives exactly its lines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nimble_jobs import spec
from nimble_jobs.errors import SpecError
from nimble_jobs.spec.rules import NOT_YET
from tests.bad_devices import BAD_DEVICES
from tests.bad_several import BAD_SEVERAL
from tests.bad_specs import BAD_SPECS, SCORE, BadSpec, edit, lay_out
from tests.bad_text_outputs import BAD_TEXT_OUTPUTS
from tests.bad_text_trainings import BAD_TEXT_TRAININGS
from tests.bad_timers import BAD_TIMERS, NIGHTLY, NOW, timer


@pytest.mark.parametrize(
    "bad", [*BAD_SPECS, *BAD_TEXT_OUTPUTS, *BAD_TEXT_TRAININGS, *BAD_SEVERAL, *BAD_DEVICES], ids=lambda bad: bad.name
)
def test_bad_spec(bad: BadSpec, tmp_path: Path) -> None:
    """All problems come at once, one line each, with exit code 2."""
    path = bad.write(tmp_path)
    with pytest.raises(SpecError) as caught:
        spec.load(path, bad.overrides)
    assert [str(p) for p in caught.value.problems] == bad.lines(path)
    assert str(caught.value).splitlines() == bad.lines(path)
    assert caught.value.exit_code == 2


def test_table_is_large_and_named_once() -> None:
    """The table holds at least forty specs, each with a name and a text of its own."""
    assert len(BAD_SPECS) >= 40
    assert len({b.name for b in BAD_SPECS}) == len(BAD_SPECS)
    assert len({(b.text, b.overrides) for b in BAD_SPECS}) == len(BAD_SPECS)


def test_every_mistake_is_the_only_one(tmp_path: Path) -> None:
    """The spec that the table starts from is itself right, so each message is owed to its mistake."""
    lay_out(tmp_path)
    (tmp_path / "job.yaml").write_text(SCORE)
    assert spec.load(tmp_path / "job.yaml").name == "digits-score"


def _load_error(path: Path) -> str:
    with pytest.raises(SpecError) as caught:
        spec.load(path)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_file_that_is_missing(tmp_path: Path) -> None:
    """A missing spec file is named."""
    path = tmp_path / "none.yaml"
    assert _load_error(path) == f"{path}: no such file; expected a job spec in YAML"


def test_folder_for_a_file(tmp_path: Path) -> None:
    """A folder is not read as a spec."""
    assert _load_error(tmp_path) == f"{tmp_path}: a folder; expected a job spec in YAML"


def test_pipe_for_a_file(tmp_path: Path) -> None:
    """A pipe nobody writes to does not hang the command."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    assert _load_error(path) == f"{path}: a named pipe; expected a job spec in YAML"


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_file_that_may_not_be_read(tmp_path: Path) -> None:
    """A spec without read permission says so."""
    path = tmp_path / "job.yaml"
    path.write_text(SCORE)
    path.chmod(0)
    assert _load_error(path) == f"{path}: cannot be read (Permission denied); expected a job spec in YAML"


def test_file_below_a_file(tmp_path: Path) -> None:
    """A path through a file is no spec, and the reason is the system's."""
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "job.yaml"
    assert _load_error(path) == f"{path}: cannot be read (Not a directory); expected a job spec in YAML"


def test_output_over_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The home folder, or one around it, is never published over."""
    monkeypatch.setenv("HOME", str(tmp_path / "people" / "me"))
    lay_out(tmp_path)
    for path, what in (("people/me", "is"), ("people", "contains")):
        text = edit(("../out/digits-score", path))
        with pytest.raises(SpecError, match=rf"^job:13: output.path: {what} the home folder; expected"):
            spec.loads(text, "job", tmp_path)


def test_output_over_the_input_through_a_link(tmp_path: Path) -> None:
    """A link does not hide that output and input are one folder."""
    lay_out(tmp_path)
    text = edit(("digits.npz", "scans/a.npz"), ("../out/digits-score", "link"))
    with pytest.raises(SpecError, match=r"output\.path: contains input\.source; expected"):
        spec.loads(text, "job", tmp_path, check_files=False)


def test_control_characters_never_reach_a_message(tmp_path: Path) -> None:
    """What a spec holds cannot add lines to the report, nor escape codes."""
    text = SCORE + '"a\\nb\\e[31m": 1\n' + 'x: "' + "long" * 100 + '"\n'
    with pytest.raises(SpecError) as caught:
        spec.loads(text, "job", tmp_path, ["run.key='a\n\nb'", "a\x1b=1"], check_files=False)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(caught.value.problems) == 4
    assert all(line.isprintable() and len(line) < 300 for line in lines)


def test_everything_not_built_yet_is_refused_by_name() -> None:
    """Each row of the one table of unbuilt capabilities has a spec that runs into it."""
    said = [m for bad in [*BAD_SPECS, *BAD_SEVERAL, *BAD_DEVICES] for m in bad.messages]
    for row in NOT_YET:
        line = f": {row.field}: not supported yet; expected {row.expected}"
        assert any(m.endswith(line) for m in said), row.field


def test_names_that_no_file_can_have(tmp_path: Path) -> None:
    """A name that is too long is missing, like any other."""
    lay_out(tmp_path)
    long = "x" * 300
    text = edit(
        ("digits.npz", f"{long}.npz"), ("../out/digits-score", long), ("args: {num_classes: 10}", f"weights: {long}.pt")
    )
    with pytest.raises(SpecError) as caught:
        spec.loads(text, "job", tmp_path)
    assert [p.field for p in caught.value.problems] == ["model.weights", "input.source"]


@pytest.mark.parametrize("bad", BAD_TIMERS, ids=lambda bad: bad.name)
def test_bad_timer(bad: BadSpec, tmp_path: Path) -> None:
    """So do mistakes about timers, seen from a day that is given."""
    path = bad.write(tmp_path)
    with pytest.raises(SpecError) as caught:
        spec.load(path, bad.overrides, now=NOW)
    assert [str(p) for p in caught.value.problems] == bad.lines(path)
    assert caught.value.exit_code == 2


def test_a_timer_is_not_submitted(tmp_path: Path) -> None:
    """Whoever wants one job of a timer's spec is told both ways."""
    lay_out(tmp_path)
    path = tmp_path / "job.yaml"
    path.write_text(timer(NIGHTLY))
    assert spec.load(path, now=NOW).cron is not None
    with pytest.raises(SpecError) as caught:
        spec.load(path, now=NOW, once=True)
    expected = f"expected `nimble-jobs cron add {path}`, or cron=null to run the job once"
    assert str(caught.value) == f"{path}:16: cron: this spec is a timer; {expected}"
    assert spec.load(path, ("cron=null", "output.path=once"), now=NOW, once=True).cron is None
