"""What the commands about timers print, how they exit, and what is left in the store."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from nimble_jobs import cron
from nimble_jobs.cli import cron as commands
from nimble_jobs.cli.cron_health import NOBODY, NOBODY_RUNS
from nimble_jobs.store import TimerChange
from nimble_jobs.worker.cron import ROLE
from tests.bad_specs import lay_out
from tests.bad_timers import BAD_TIMERS, NIGHTLY, NOW, timer
from tests.cli import Answer, Cli

DAY = 86_400
ROW = {"name", "state", "last_tick", "last_outcome", "last_job", "next_tick", "next_local", "late_s"}


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    lay_out(tmp_path)
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    return Cli(tmp_path / "home", capsys)


def write(folder: Path, cron_part: str = NIGHTLY + "timezone: Europe/Berlin\n", name: str = "digits-score") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(timer(cron_part).replace("name: digits-score", f"name: {name}"))
    return path


def done(answer: Answer) -> Answer:
    assert answer.code == 0, answer.err
    return answer


def test_add_keeps_a_timer_and_shows_its_next_five_ticks(cli: Cli) -> None:
    """In words and by the clocks of its zone; nobody is there to fire it, which is said."""
    answer = done(cli("cron", "add", "digits-score.yaml"))
    assert answer.out == "digits-score\n"
    assert answer.lines[:2] == ["digits-score: added", "  at 02:15 every day, Europe/Berlin; next:"]
    assert [line.split()[1] for line in answer.lines[2:7]] == ["02:15"] * 5
    assert all(", in " in line for line in answer.lines[2:7])
    assert answer.lines[7] == NOBODY
    again = done(cli("cron", "add", "digits-score.yaml", "--json"))
    assert again.json["change"] == "unchanged"
    assert len(again.json["next"]) == 5
    edited = done(cli("cron", "add", "digits-score.yaml", "cron.timezone=UTC"))
    assert edited.lines[0] == "digits-score: edited: cron.timezone"


def test_a_name_that_another_file_has_is_told(cli: Cli, tmp_path: Path) -> None:
    """A copy whose name was not changed edits the timer of the first one."""
    done(cli("cron", "add", "digits-score.yaml"))
    (tmp_path / "copy.yaml").write_text((tmp_path / "digits-score.yaml").read_text().replace("15 2", "15 3"))
    told = done(cli("cron", "add", "copy.yaml")).lines[0]
    assert told == "digits-score: edited: cron.expression; it was added from digits-score.yaml before"


def test_a_dry_run_keeps_nothing(cli: Cli) -> None:
    answer = done(cli("cron", "add", "digits-score.yaml", "--dry-run"))
    assert answer.out == ""
    assert answer.lines[0] == "digits-score: would be added (dry run)"
    assert done(cli("cron", "ls", "-q")).out == ""


def test_bad_timers_are_refused_with_their_exact_lines(cli: Cli, tmp_path: Path) -> None:
    """Exit code 2, and nothing is kept."""
    for number, bad in enumerate(BAD_TIMERS[:3]):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = bad.write(folder)
        answer = cli("cron", "add", path)
        assert (answer.code, answer.out, answer.lines) == (2, "", bad.lines(path))
    assert done(cli("cron", "ls", "--json")).json == []


def test_a_spec_without_cron_is_no_timer(cli: Cli) -> None:
    answer = cli("cron", "add", "digits-score.yaml", "cron=null", "output.path=out")
    assert answer.code == 2
    assert answer.err == "nimble-jobs: digits-score.yaml: cron: missing; expected a cron part with an expression\n"


@pytest.mark.parametrize("command", ["submit", "run"])
def test_a_timer_is_not_submitted(cli: Cli, command: str) -> None:
    """A timer that ran once by mistake would look as if it were set."""
    answer = cli(command, "digits-score.yaml")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith(
        "digits-score.yaml:16: cron: this spec is a timer; expected `nimble-jobs cron add digits-"
    )
    assert done(cli("ls", "--json")).json == []


def test_ls_says_when_and_what_last_became_of_it(cli: Cli, tmp_path: Path) -> None:
    """Rows can be filtered and sorted as those of every listing."""
    done(cli("cron", "add", write(tmp_path, 'expression: "@monthly"\n', "monthly")))
    done(cli("cron", "add", "digits-score.yaml"))
    job = done(cli("cron", "trigger", "monthly")).out.strip()
    rows = {row["name"]: row for row in done(cli("cron", "ls", "--json")).json}
    assert list(rows) == ["digits-score", "monthly"]
    assert rows["monthly"].keys() >= ROW
    last = (rows["monthly"]["last_kind"], rows["monthly"]["last_outcome"], rows["monthly"]["last_job"])
    assert last == ("manual", "submitted", job)
    assert rows["monthly"]["last_state"] == "queued"
    assert rows["digits-score"]["last_outcome"] is None
    assert rows["digits-score"]["next_local"].split()[1] == "02:15"
    assert done(cli("cron", "ls", "-q", "--filter", "timezone=UTC")).out == "monthly\n"
    assert done(cli("cron", "ls", "-q", "--sort", "-name", "-n", "1")).out == "monthly\n"
    assert cli("cron", "ls", "--filter", "zone=UTC").code == 2


def test_a_failed_job_says_why(cli: Cli) -> None:
    """In `cron ls` and in the tick's line: the first line of the job's error."""
    done(cli("cron", "add", "digits-score.yaml"))
    job = done(cli("cron", "trigger", "digits-score")).out.strip()
    with closing(cli.store()) as store:
        claimed = store.jobs.claim("w", device="cpu", now=time.time())
        assert claimed is not None
        error = "out/2026-11-22: exists already\nmore about it"
        store.jobs.fail(claimed.id, 1, error=error, retry=False, lost=False, now=time.time())
    assert done(cli("cron", "ls")).out.splitlines()[1].endswith("\tout/2026-11-22: exists already")
    (row,) = done(cli("cron", "ls", "--json")).json
    assert (row["last_state"], row["last_reason"], row["last_error"]) == ("failed", None, error)
    shown = done(cli("cron", "show", "digits-score"))
    assert f"manual, submitted as {job}, failed: out/2026-11-22: exists already\n" in shown.out


def test_a_late_tick_is_late_until_somebody_fires_it(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """As seen two days later, when nobody has been there."""
    with closing(cli.store()) as store:
        cron.add(Path("digits-score.yaml"), store=store, now=NOW)
        (watched,) = cron.timers(store=store, now=NOW + 2 * DAY)
        assert watched.next is not None
        assert watched.late_s == NOW + 2 * DAY - watched.next.at > DAY
        kinds = [(tick.kind.value, tick.outcome.value) for tick in cron.fire(store=store, now=NOW + 2 * DAY)]
        assert kinds == [("scheduled", "missed"), ("catch-up", "submitted")]
        (watched,) = cron.timers(store=store, now=NOW + 2 * DAY)
        assert (watched.late_s, watched.last_state) == (0, "queued")
    monkeypatch.setattr(commands, "Selection", partial(commands.Selection, now=NOW + 2 * DAY))
    assert "late" not in done(cli("cron", "ls")).out


def test_next_merges_all_timers(cli: Cli, tmp_path: Path) -> None:
    """Those that are paused only where they are named."""
    done(cli("cron", "add", "digits-score.yaml"))
    done(cli("cron", "add", write(tmp_path, 'expression: "45 3 * * *"\ntimezone: Europe/Berlin\n', "other")))
    rows = done(cli("cron", "next", "-n", "4", "--json")).json
    assert sorted(row["name"] for row in rows) == ["digits-score"] * 2 + ["other"] * 2
    assert [row["tick"] for row in rows] == sorted(row["tick"] for row in rows)
    done(cli("cron", "pause", "other"))
    assert {row["name"] for row in done(cli("cron", "next", "--json")).json} == {"digits-score"}
    named = done(cli("cron", "next", "other", "-n", "2"))
    assert len(named.out.splitlines()) == 3
    assert named.lines[0] == "other is paused; if you resume it, its next ticks are:"


def test_pause_and_resume(cli: Cli) -> None:
    done(cli("cron", "add", "digits-score.yaml"))
    assert done(cli("cron", "pause", "digits-score")).err == "digits-score: paused\n"
    paused = done(cli("cron", "ls", "--json"))
    assert (paused.json[0]["state"], paused.json[0]["next_tick"], paused.err) == ("paused", None, "")
    resumed = done(cli("cron", "resume", "digits-score"))
    assert resumed.lines[0] == "digits-score: resumed"
    assert resumed.lines[1].startswith("  next: ")
    assert cli("cron", "pause", "digits-score", "nothing").code == 102
    assert done(cli("cron", "ls", "--json")).json[0]["state"] == "active"  # of several, all or none


def test_show_holds_the_spec_and_the_history(cli: Cli) -> None:
    done(cli("cron", "add", "digits-score.yaml"))
    job = done(cli("cron", "trigger", "digits-score")).out.strip()
    shown = done(cli("cron", "show", "digits-score", "--json")).json
    assert shown["spec"]["output"]["path"].endswith("{{ tick:%Y-%m-%d }}")
    assert len(shown["next"]) == 5
    assert [(tick["kind"], tick["outcome"], tick["job"]) for tick in shown["ticks"]] == [("manual", "submitted", job)]
    text = done(cli("cron", "show", "digits-score")).out
    assert "timer.when: at 02:15 every day, Europe/Berlin\n" in text
    assert f": manual, submitted as {job}, queued\n" in text
    missing = cli("cron", "show", "digits")
    assert missing.code == 102
    assert missing.err == "nimble-jobs: timer digits: no such timer; list timers with: nimble-jobs cron ls\n"


def test_backfill_looks_first_where_it_is_asked_to(cli: Cli) -> None:
    done(cli("cron", "add", "digits-score.yaml"))
    asked = ("cron", "backfill", "digits-score", "--from", "2026-01-03", "--to", "2026-01-05")
    looked = done(cli(*asked, "--dry-run"))
    assert looked.out.splitlines() == [f"2026-01-0{day} 02:15 +01:00: runs" for day in (3, 4, 5)]
    assert looked.lines == ["digits-score: 3 of 3 ticks would run, 1 at once"]
    assert done(cli("cron", "show", "digits-score", "--json")).json["ticks"] == []
    kept = done(cli(*asked, "--max-running", "2", "--json")).json
    assert (kept["kept"], kept["runs"]) == (True, 3)
    ticks = done(cli("cron", "show", "digits-score", "--json")).json["ticks"]
    assert [(tick["kind"], tick["outcome"]) for tick in ticks] == [("backfill", "waiting")] * 3
    wrong = cli(*asked[:4], "yesterday", "--to", "2026-01-05")
    assert (wrong.code, "--from: found 'yesterday'; expected a date" in wrong.err) == (2, True)
    wrong = cli(*asked[:4], "2026-01-03", "--to", "now")
    assert (wrong.code, "--to: found 'now'; expected a date" in wrong.err) == (2, True)
    assert cli(*asked[:4], "2026-01-05", "--to", "2026-01-03").code == 2


def test_rm_asks_first(cli: Cli) -> None:
    done(cli("cron", "add", "digits-score.yaml"))
    assert cli("cron", "rm", "digits-score").code == 2
    assert done(cli("cron", "rm", "digits-score", "--dry-run")).err == "would remove digits-score\n"
    assert done(cli("cron", "ls", "-q")).out == "digits-score\n"
    assert done(cli("cron", "rm", "digits-score", "--yes", "--json")).json == {
        "removed": True,
        "timers": ["digits-score"],
    }
    assert done(cli("cron", "ls", "-q")).out == ""


def test_who_fires_timers_is_no_worker_yet(cli: Cli) -> None:
    """With `cron serve` alone ticks are fired, but nobody runs their jobs."""
    done(cli("cron", "add", "digits-score.yaml"))
    with closing(cli.store()) as store, store.workers.hold({"role": ROLE, "status": "ready"}):
        assert done(cli("cron", "ls")).lines == [NOBODY_RUNS]
    with closing(cli.store()) as store, store.workers.hold({"role": "worker", "status": "ready", "device": "cpu"}):
        assert done(cli("cron", "ls")).lines == []
    assert done(cli("cron", "ls")).lines == [NOBODY]


def test_names_are_completed(cli: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """By the shell, which asks with variables in the environment; where there is no store, nothing is said or made."""
    monkeypatch.setenv("_NIMBLE_JOBS_COMPLETE", "complete_bash")
    monkeypatch.setenv("NIMBLE_JOBS_HOME", str(cli.home))
    monkeypatch.setenv("COMP_WORDS", "nimble-jobs cron show dig")
    monkeypatch.setenv("COMP_CWORD", "3")
    assert cli().out.strip() == ""
    assert not cli.home.exists()
    with closing(cli.store()) as store:
        cron.add(Path("digits-score.yaml"), store=store)
    assert cli().out.strip() == "digits-score"


def test_from_python(cli: Cli) -> None:
    """The same, with the time as an argument."""
    with closing(cli.store()) as store:
        added = cron.add("digits-score.yaml", store=store, now=NOW)
        assert (added.name, added.change, added.words) == (
            "digits-score",
            TimerChange.ADDED,
            "at 02:15 every day, Europe/Berlin",
        )
        assert [due.tick for due in added.next] == [
            due.tick for _, due in cron.upcoming("digits-score", 5, store=store, now=NOW)
        ]
        assert cron.pause("digits-score", store=store, now=NOW).state == "paused"
        assert cron.resume("digits-score", store=store, now=NOW + 10 * DAY).since == NOW + 10 * DAY
        assert cron.show("digits-score", store=store, now=NOW + 10 * DAY).last is None
        tick = cron.trigger("digits-score", store=store, now=NOW + 10 * DAY)
        assert cron.history("digits-score", store=store) == [tick]
        assert cron.remove("digits-score", store=store).name == "digits-score"
        assert cron.timers(store=store) == []


def test_doctor_says_whether_timers_are_fired(cli: Cli) -> None:
    """Nothing where there are none; a problem where nobody fires them."""

    def timers() -> list[tuple[str, str]]:
        answer = cli("doctor", "--no-device", "--json")
        return [(found["status"], found["detail"]) for found in answer.json["findings"] if found["name"] == "timers"]

    assert timers() == []
    done(cli("cron", "add", "digits-score.yaml"))
    assert timers() == [("problem", NOBODY.removeprefix("WARNING: ")), ("ok", "1 active, 0 paused")]
    with closing(cli.store()) as store, store.workers.hold({"role": ROLE, "status": "ready"}):
        assert timers() == [("ok", "1 active, 0 paused")]
    done(cli("cron", "pause", "digits-score"))
    assert timers() == [("ok", "0 active, 1 paused")]


def test_show_says_which_tick_a_job_is_for(cli: Cli) -> None:
    done(cli("cron", "add", "digits-score.yaml"))
    job = done(cli("cron", "trigger", "digits-score")).out.strip()
    tick = done(cli("show", job, "--json")).json["tick"]
    assert (tick["timer"], tick["kind"], tick["outcome"]) == ("digits-score", "manual", "submitted")
    assert "job.tick: manual, of " in done(cli("show", job)).out


def test_a_template_is_filled_in_where_a_model_is_looked_at(cli: Cli, tmp_path: Path) -> None:
    """`validate --data` reads the input of the last tick."""
    path = tmp_path / "dated.yaml"
    text = timer(NIGHTLY).replace("digits.npz", "'{{ tick:%Y-%m-%d }}.npz'")
    path.write_text(text)
    answer = cli("validate", path, "--data")
    assert answer.code != 0
    (note, *_) = answer.lines
    assert note.startswith("with the templates of the last tick, 20")
    assert "{{" not in answer.err


def test_validate_says_when(cli: Cli) -> None:
    answer = done(cli("validate", "digits-score.yaml"))
    assert answer.lines == ["digits-score.yaml: valid; a timer: at 02:15 every day, Europe/Berlin"]


def test_timers_load_no_torch() -> None:
    """Neither the commands, nor whoever fires them where no worker is."""
    code = (
        "import sys, nimble_jobs.cron, nimble_jobs.cli.cron, nimble_jobs.worker.cron; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
