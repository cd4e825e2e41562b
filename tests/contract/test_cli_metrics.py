"""The command metrics: prints an exposition, or writes it to a file."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import Cli
from tests.metrics import parsed, value
from tests.store_samples import submit

PROMTOOL = shutil.which("promtool")


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path / "home", capsys)


def test_prints_both_formats(cli: Cli) -> None:
    """The text format by default, OpenMetrics if asked for."""
    with cli.store() as store:
        submit(store)
    answer = cli("metrics")
    assert (answer.code, answer.err) == (0, "")
    assert value(parsed(answer.out), "jobs", state="queued", kind="score") == 1
    assert cli("metrics", "--openmetrics").out.endswith("# EOF\n")


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool: install prometheus to run this")
def test_promtool_accepts_metrics_and_alerts(cli: Cli) -> None:
    """Neither an error nor advice."""
    assert PROMTOOL is not None
    with cli.store() as store:
        submit(store)
    checked = subprocess.run(
        [PROMTOOL, "check", "metrics"], input=cli("metrics").out, capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
    rules = Path(__file__).resolve().parents[2] / "docs" / "alerts.yml"
    checked = subprocess.run([PROMTOOL, "check", "rules", rules], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, ""), checked
    assert "SUCCESS" in checked.stdout


def test_a_file_is_replaced_with_its_mode(cli: Cli, tmp_path: Path) -> None:
    """Whatever the umask is, node_exporter can read the file, and no temporary file is left."""
    path = tmp_path / "text" / "nimble.prom"
    path.parent.mkdir()
    path.write_text("old")
    path.chmod(0o600)
    before = os.umask(0o077)
    try:
        answer = cli("metrics", "--textfile", path)
    finally:
        os.umask(before)
    assert (answer.code, answer.out, answer.err) == (0, "", "")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert value(parsed(path.read_text()), "timer_processes") == 0
    assert [each.name for each in path.parent.iterdir()] == ["nimble.prom"]


def test_left_over_temporary_files_go(cli: Cli, tmp_path: Path) -> None:
    """Those of killed processes, but not one that another process is writing now."""
    old, new = tmp_path / ".nimble.prom.0123abcd", tmp_path / ".nimble.prom.abcd0123"
    old.touch()
    new.touch()
    os.utime(old, (1.0, 1.0))
    assert cli("metrics", "--textfile", tmp_path / "nimble.prom").code == 0
    assert (old.exists(), new.exists()) == (False, True)


def test_what_is_no_file_is_refused(cli: Cli, tmp_path: Path) -> None:
    """A link, a folder, a pipe, a socket, and a missing folder, each with its name; nothing is changed."""
    (tmp_path / "target").write_text("mine")
    (tmp_path / "link.prom").symlink_to(tmp_path / "target")
    (tmp_path / "folder.prom").mkdir()
    os.mkfifo(tmp_path / "pipe.prom")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket.prom"))
        for name, words in (
            ("link.prom", "is a symbolic link; expected a regular file, or a new name"),
            ("folder.prom", "is a folder; expected a regular file, or a new name"),
            ("pipe.prom", "is a named pipe; expected a regular file, or a new name"),
            ("socket.prom", "is a socket; expected a regular file, or a new name"),
            ("none/x.prom", "is not a folder; make it first"),
        ):
            answer = cli("metrics", "--textfile", tmp_path / name)
            assert answer.code == 2
            assert answer.err.startswith("nimble-jobs: --textfile: ")
            assert answer.err.endswith(f"{words}\n")
    answer = cli("metrics", "--textfile", tmp_path / "nimble.txt")
    assert answer.code == 2
    assert "expected a name that ends in .prom" in answer.err
    assert (tmp_path / "target").read_text() == "mine"
    assert (tmp_path / "link.prom").is_symlink()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--every", "5s"], "--every needs --textfile PATH"),
        (["--every", "0.1s", "--textfile", "x.prom"], "--every: found 0.1s; expected at least 1s"),
        (["--every", "soon", "--textfile", "x.prom"], "--every: "),
        (["--openmetrics", "--textfile", "x.prom"], "reads Prometheus' text format only"),
        (["--grafana", "--openmetrics"], "--grafana prints the dashboard alone"),
    ],
)
def test_options_that_do_not_go_together(cli: Cli, args: list[str], words: str) -> None:
    """Exit code 2, with what to do."""
    answer = cli("metrics", *args)
    assert answer.code == 2
    assert words in answer.err


def test_the_dashboard(cli: Cli) -> None:
    """JSON to import, without a state folder."""
    answer = cli("metrics", "--grafana")
    assert (answer.code, answer.json["title"]) == (0, "nimble-jobs")
    assert not cli.home.exists()


def test_without_the_extra(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says what to install."""
    for name in [name for name in sys.modules if name.split(".")[0] == "prometheus_client"]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.startswith("nimble_jobs.metrics")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    expected = "metrics: prometheus_client is not installed; install it with: pip install 'nimble-jobs[metrics]'"
    for args in ([], ["--grafana"], ["--openmetrics"]):
        answer = cli("metrics", *args)
        assert (answer.code, answer.err) == (2, f"nimble-jobs: {expected}\n")


def test_a_damaged_database(cli: Cli) -> None:
    """One line that names the file, and no sample."""
    with cli.store() as store:
        path = store.home / "nimble-jobs.db"
    data = bytearray(path.read_bytes())
    data[:4096] = b"\x5a" * 4096
    path.write_bytes(data)
    answer = cli("metrics")
    assert answer.code == 1
    assert answer.out == ""
    assert str(path) in answer.err
    assert len(answer.lines) == 1
