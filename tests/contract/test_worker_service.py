"""worker service install, uninstall, status: with a systemctl that notes what it is asked for, and without one."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path

import pytest

from nimble_jobs.cli.main import main

SYSTEMCTL = """#!/bin/sh
echo "$*" >> "$FAKE/calls"
shift 2
case "$1" in
show)
  [ "$2" = --property=Version ] || cat "$FAKE/state"
  [ ! -e "$FAKE/no-bus" ] || { echo "Failed to connect to bus" >&2; exit 1; } ;;
enable) [ ! -e "$FAKE/broken" ] || { echo "Failed to enable unit: it is masked" >&2; exit 1; } ;;
esac
"""
RUNNING = """LoadState=loaded
ActiveState=active
SubState=running
UnitFileState=enabled
MainPID=4242
Result=success
ExecMainStatus=0
NRestarts=0
StateChangeTimestamp=Sun 2026-11-22 20:00:00 UTC
"""
FAILED = """LoadState=loaded
ActiveState=failed
SubState=failed
UnitFileState=enabled
MainPID=0
Result=exit-code
ExecMainStatus=1
NRestarts=5
StateChangeTimestamp=
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the false systemctl keeps what it heard; nothing else is on PATH."""
    folder = tmp_path / "fake"
    folder.mkdir()
    (folder / "state").write_text(RUNNING)
    script = folder / "systemctl"
    script.write_text(SYSTEMCTL)
    script.chmod(0o755)
    for program in ("sh", "cat"):
        (folder / program).symlink_to(shutil.which(program) or "")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("FAKE", str(folder))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("NIMBLE_JOBS_HOME", str(tmp_path / "state folder"))
    return folder


def heard(fake: Path) -> list[str]:
    calls = fake / "calls"
    found = calls.read_text().splitlines() if calls.exists() else []
    calls.unlink(missing_ok=True)
    return [call.removeprefix("--user --no-pager ") for call in found]


def unit_of(fake: Path) -> Path:
    (found,) = (fake.parent / "config" / "systemd" / "user").iterdir()
    return found


def test_install_again_and_uninstall(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The unit is written for this folder alone, read, enabled and started; again changes nothing; then it is gone."""
    assert main(["worker", "service", "install"]) == 0
    unit = unit_of(fake)
    said = capsys.readouterr()
    assert said.out == f"{unit.name}\n"
    assert f"{unit}: written" in said.err
    assert "loginctl enable-linger" in said.err
    assert heard(fake) == ["show --property=Version", "daemon-reload", f"enable --now {unit.name}"]
    assert f'--home" "{fake.parent}/state folder"' in unit.read_text()
    assert stat.S_IMODE(unit.stat().st_mode) == 0o600
    assert main(["worker", "service", "install"]) == 0
    assert f"{unit}: unchanged" in capsys.readouterr().err
    assert main(["worker", "service", "install", "--device", "cpu", "--gpu-memory", "2GB"]) == 0
    said = capsys.readouterr()
    assert f"{unit}: replaced" in said.err
    assert f"systemctl --user restart {unit.name}" in said.err
    assert '"--device" "cpu" "--gpu-memory-bytes" "2000000000"' in unit.read_text()
    heard(fake)
    assert main(["worker", "service", "uninstall", "--dry-run"]) == 0
    assert main(["worker", "service", "uninstall"]) == 2
    assert heard(fake) == []
    assert unit.exists()
    assert main(["worker", "service", "uninstall", "--yes"]) == 0
    expected = [f"disable --now {unit.name}", "daemon-reload", f"reset-failed {unit.name}"]
    assert heard(fake) == ["show --property=Version", *expected]
    assert not unit.exists()
    capsys.readouterr()
    assert main(["worker", "service", "uninstall", "--yes"]) == 102
    assert "no service is installed for the state folder" in capsys.readouterr().err


def test_a_password_is_kept_beside_the_unit(
    fake: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file that only its owner can read, and that goes with the unit, or once there is no password any more."""
    monkeypatch.setenv("NIMBLE_JOBS_DB", "postgresql+psycopg://jobs:sekret@host/db")
    folder = fake.parent / "config" / "systemd" / "user"

    def install() -> str:
        assert main(["worker", "service", "install"]) == 0
        said = capsys.readouterr()
        assert "sekret" not in said.out + said.err
        return said.err

    assert "only you can read it" in install()
    secrets, unit = sorted(folder.iterdir())
    assert (secrets.suffix, unit.suffix, secrets.stem) == (".env", ".service", unit.stem)
    assert secrets.read_text() == 'NIMBLE_JOBS_DB="postgresql+psycopg://jobs:sekret@host/db"\n'
    assert [stat.S_IMODE(path.stat().st_mode) for path in (secrets, unit)] == [0o600, 0o600]
    assert "sekret" not in unit.read_text()
    assert f"{unit}: unchanged" in install()
    monkeypatch.setenv("NIMBLE_JOBS_DB", "postgresql+psycopg://jobs:other@host/db")
    assert f"{unit}: replaced" in install()  # the running worker has the old password
    assert "other" in secrets.read_text()
    monkeypatch.setenv("NIMBLE_JOBS_DB", "postgresql+psycopg://jobs@host/db")
    assert f"{unit}: replaced" in install()
    assert list(folder.iterdir()) == [unit]
    monkeypatch.setenv("NIMBLE_JOBS_DB", "postgresql+psycopg://jobs:sekret@host/db")
    install()
    assert main(["worker", "service", "uninstall", "--dry-run"]) == 0
    assert f"and remove {unit} and {secrets}" in capsys.readouterr().err
    monkeypatch.delenv("NIMBLE_JOBS_DB")
    assert main(["worker", "service", "uninstall", "--yes"]) == 0
    assert list(folder.iterdir()) == []


def test_two_folders_have_two_units(fake: Path) -> None:
    """Neither install touches the other's file."""
    homes = [str(fake.parent / name) for name in ("a", "b")]
    for home in homes:
        assert main(["--home", home, "worker", "service", "install"]) == 0
    units = sorted((fake.parent / "config" / "systemd" / "user").iterdir())
    assert len(units) == 2
    assert [home in "".join(unit.read_text() for unit in units) for home in homes] == [True, True]


def test_status(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What systemd says of the unit; 102 where none is installed."""
    assert main(["worker", "service", "status"]) == 102
    main(["worker", "service", "install"])
    capsys.readouterr()
    assert main(["worker", "service", "status", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["unit"], row["active"], row["enabled"], row["pid"]) == (unit_of(fake).name, "active", True, 4242)
    assert (row["worker"], row["since"]) == (None, "Sun 2026-11-22 20:00:00 UTC")
    (fake / "state").write_text(FAILED)
    assert main(["worker", "service", "status"]) == 0
    said = capsys.readouterr()
    assert "failed   exit-code, exit code 1, restarted 5 times" in said.out
    assert "journalctl --user -u" in said.err


def test_a_unit_is_removed_without_systemd(
    fake: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the file that holds the password."""
    monkeypatch.setenv("NIMBLE_JOBS_DB", "postgresql+psycopg://jobs:sekret@host/db")
    assert main(["worker", "service", "install"]) == 0
    (fake / "systemctl").unlink()
    assert main(["worker", "service", "uninstall", "--yes"]) == 0
    assert "only files are removed" in capsys.readouterr().err
    assert list((fake.parent / "config" / "systemd" / "user").iterdir()) == []


@pytest.mark.parametrize("why", ["no systemctl", "no bus"])
def test_without_systemd(
    fake: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Nothing is written; the command that somebody else must run is printed without the password, and the exit code
    says it.
    """
    monkeypatch.setenv("NIMBLE_JOBS_DB", "postgresql+psycopg://jobs:sekret@host/db")
    if why == "no systemctl":
        (fake / "systemctl").unlink()
    else:
        (fake / "no-bus").touch()
    assert main(["worker", "service", "install"]) == 1
    said = capsys.readouterr()
    expected = "there is no systemctl on PATH" if why == "no systemctl" else "does not work: Failed to connect to bus"
    assert expected in said.err
    assert f"-m nimble_jobs.worker --home '{fake.parent}/state folder'" in said.out
    assert "SIGKILL after 90 s" in said.out
    assert "sekret" not in said.out + said.err
    assert "@reboot NIMBLE_JOBS_HOME=" in said.out
    assert not (fake.parent / "config").exists()


def test_systemd_refuses(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own words are passed on."""
    (fake / "broken").touch()
    assert main(["worker", "service", "install"]) == 1
    assert "exit code 1: Failed to enable unit: it is masked" in capsys.readouterr().err


def test_a_dry_run_prints_the_unit(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And does nothing."""
    assert main(["worker", "service", "install", "--dry-run"]) == 0
    assert "\nExecStart=:" in capsys.readouterr().out
    assert heard(fake) == []
    assert not (fake.parent / "config").exists()
