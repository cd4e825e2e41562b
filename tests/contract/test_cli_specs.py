"""Bad specs end with exit code 2, one line a problem, nothing queued; good ones can be looked at without a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bad_specs import BAD_SPECS, SCORE, BadSpec, lay_out
from tests.cli import Cli


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path / "home", capsys)


@pytest.fixture
def good(tmp_path: Path) -> Path:
    folder = tmp_path / "good"
    folder.mkdir()
    lay_out(folder)
    path = folder / "job.yaml"
    path.write_text(SCORE)
    return path


@pytest.mark.parametrize("command", ["validate", "submit", "run", "explain"])
def test_bad_specs_are_refused_with_their_exact_lines(cli: Cli, tmp_path: Path, command: str) -> None:
    """Whatever command is given a bad spec says all its problems on stderr, nothing on stdout, and exits with 2."""
    chosen = BAD_SPECS if command == "validate" else BAD_SPECS[::40]
    for number, bad in enumerate(chosen):
        folder = tmp_path / f"{command}-{number}"
        folder.mkdir()
        path = bad.write(folder)
        answer = cli(command, path, *bad.overrides)
        assert (answer.code, answer.out, answer.lines) == (2, "", _expected(bad, path)), bad.name
    assert cli("ls", "--json").json == []


def _expected(bad: BadSpec, path: Path) -> list[str]:
    return [line for message in bad.lines(path) for line in message.splitlines()]


def test_there_are_forty_bad_specs() -> None:
    """The table of mistakes is as long as was promised."""
    assert len(BAD_SPECS) >= 40


def test_validate_says_that_a_spec_is_valid(cli: Cli, good: Path) -> None:
    """A good spec gives exit code 0 and silence on stdout; with --json it is printed as it was understood."""
    answer = cli("validate", good)
    assert (answer.code, answer.out, answer.lines) == (0, "", [f"{good}: valid"])
    understood = cli("validate", good, "input.batch_size=8", "--json").json
    assert understood["input"]["batch_size"] == 8
    assert understood["input"]["source"] == str(good.parent / "digits.npz")


def test_a_missing_spec_is_bad_usage(cli: Cli, tmp_path: Path) -> None:
    """A file that is not there is named, with exit code 2."""
    answer = cli("submit", tmp_path / "none.yaml")
    assert answer.code == 2
    assert len(answer.lines) == 1
    assert str(tmp_path / "none.yaml") in answer.err


def test_schema_is_a_json_schema(cli: Cli) -> None:
    """`schema` prints an object that editors understand."""
    answer = cli("schema")
    assert answer.code == 0
    assert answer.json["type"] == "object"
    assert {"version", "name", "kind", "model", "input", "output"} <= set(answer.json["properties"])


def test_a_dry_run_queues_nothing(cli: Cli, good: Path) -> None:
    """`submit --dry-run` prints the resolved spec and leaves the queue alone."""
    answer = cli("submit", good, "--dry-run")
    assert answer.code == 0
    assert answer.json["name"] == "digits-score"
    assert cli("ls", "--json").json == []


SORTED = (
    "id, name, kind, state, attempt, created_at, started_at, finished_at, elapsed_s, records_done, records_total, "
    "records_bad, records_per_s, phase, hit, runs, device, priority, urgency, held, group, array, array_index, worker, "
    "error, waits"
)
FILTERED = f"{SORTED}, since, until, text"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["sumbit"], "nimble-jobs: No such command 'sumbit'. Did you mean 'submit'? (see nimble-jobs --help)"),
        (["submit"], "nimble-jobs: no spec given; give SPEC, or --from FILE"),
        (["ls", "--bogus"], "nimble-jobs: No such option: --bogus (see nimble-jobs ls --help)"),
        (
            ["ls", "--filter", "state"],
            "nimble-jobs: --filter: 'state' is not a condition; expected KEY=VALUE, or !=, >, <, >=, <=; "
            f"KEY is one of {FILTERED}",
        ),
        (
            ["ls", "--filter", "stat=x"],
            f"nimble-jobs: --filter: unknown key 'stat'; did you mean state? expected one of {FILTERED}",
        ),
        (
            ["ls", "--sort", "nme"],
            f"nimble-jobs: --sort: unknown key 'nme'; did you mean name? expected one of {SORTED}",
        ),
        (
            ["worker", "start", "--max-idle", "soon"],
            "nimble-jobs: --max-idle: found 'soon'; expected seconds or a duration such as 90, 5s, 10m, 2h or 1h30m",
        ),
        (
            ["worker", "start", "--max-time", "0s"],
            "nimble-jobs: --max-time: found 0; expected a time for the worker to run, such as 3h55m",
        ),
        (
            ["worker", "start", "--gpu-memory", "much"],
            "nimble-jobs: --gpu-memory: found 'much'; expected bytes or a size such as 512MiB or 20GB",
        ),
    ],
)  # fmt: skip
def test_bad_usage_is_one_line(cli: Cli, args: list[str], message: str) -> None:
    """Bad usage gives exit code 2 and one line that says what was expected."""
    answer = cli(*args)
    assert (answer.code, answer.out, answer.lines) == (2, "", [message])


def test_what_nobody_foresaw_is_one_line_without_a_traceback(
    cli: Cli, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unexpected error gives exit code 1 and its name; the traceback comes with --debug only."""

    def fail(*_args: object, **_kwargs: object) -> None:
        raise KeyError("lost")

    monkeypatch.setattr("nimble_jobs.spec.load", fail)
    answer = cli("validate", good)
    assert (answer.code, answer.out) == (1, "")
    assert answer.lines == ["nimble-jobs: unexpected error: KeyError: 'lost'; run again with --debug"]
    assert "Traceback" in cli("validate", good, "--debug").err
