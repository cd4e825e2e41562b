"""The user's systemd, through `systemctl --user`."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nimble_jobs.errors import NimbleError
from nimble_jobs.whole import write_whole

_LIMIT_S = 150.0  # a stop waits for the current job
_SHOWN = "LoadState,ActiveState,SubState,UnitFileState,MainPID,Result,ExecMainStatus,NRestarts,StateChangeTimestamp"


@dataclass(frozen=True, kw_only=True)
class State:
    """systemd's view of a unit."""

    load: str  # loaded | not-found | bad-setting | error | masked
    active: str  # active | inactive | failed | activating | deactivating
    sub: str  # running | dead | auto-restart | ...
    enabled: bool  # it starts with the user's session
    pid: int | None
    result: str  # success | exit-code | signal | timeout | start-limit-hit | ...
    exit_status: int
    restarts: int
    since: str | None  # systemd's own words


class Manager:
    """Units of this user. `environ` decides their folder and which systemctl is called."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = dict(os.environ if environ is None else environ)

    @property
    def folder(self) -> Path:
        """The folder of the user's unit files."""
        config = self._environ.get("XDG_CONFIG_HOME")
        home = Path(self._environ.get("HOME") or Path.home())
        return (Path(config) if config and Path(config).is_absolute() else home / ".config") / "systemd" / "user"

    def path(self, name: str) -> Path:
        """The file of a unit."""
        return self.folder / name

    def missing(self) -> str | None:
        """Why systemd cannot be used here, in words; None if it can."""
        if shutil.which("systemctl", path=self._environ.get("PATH")) is None:
            return "there is no systemctl on PATH"
        done = self._call("show", "--property=Version")
        if done.returncode == 0:
            return None
        return f"systemctl --user does not work: {_reason(done) or f'exit code {done.returncode}'}"

    def write(self, name: str, text: str) -> bool:
        """Write a unit file, or a file beside it. False if it is unchanged. Raises OSError."""
        path = self.path(name)
        if self.read(name) == text:
            return False
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        write_whole(path, text.encode())  # private: one holds a password, and search paths are nobody else's concern
        return True

    def read(self, name: str) -> str | None:
        """A unit file, if it exists."""
        try:
            return self.path(name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def enable(self, name: str) -> None:
        """Reload unit files, and start this unit now and with each session. Raises NimbleError with systemd's words."""
        self._must("daemon-reload")
        self._must("enable", "--now", name)

    def disable(self, name: str) -> None:
        """Stop the unit, and do not start it again. Raises NimbleError."""
        self._must("disable", "--now", name)

    def remove(self, name: str) -> bool:
        """Remove a unit file, or a file beside it. False if there is none. Raises OSError."""
        try:
            self.path(name).unlink()
        except FileNotFoundError:
            return False
        return True

    def forget(self, name: str) -> None:
        """Have systemd forget a unit whose file was removed. Raises NimbleError."""
        self._must("daemon-reload")
        self._call("reset-failed", name)  # fails harmlessly if the unit had not failed

    def state(self, name: str) -> State:
        """The unit's state. Raises NimbleError if systemd does not tell."""
        shown = self._must("show", name, f"--property={_SHOWN}")
        values = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
        return State(
            load=values.get("LoadState", "unknown"),
            active=values.get("ActiveState", "unknown"),
            sub=values.get("SubState", "unknown"),
            enabled=values.get("UnitFileState") in ("enabled", "enabled-runtime"),
            pid=_number(values.get("MainPID")) or None,
            result=values.get("Result", "unknown"),
            exit_status=_number(values.get("ExecMainStatus")),
            restarts=_number(values.get("NRestarts")),
            since=values.get("StateChangeTimestamp") or None,
        )

    def lingers(self) -> bool | None:
        """Whether the user's services keep running after logout and start with the machine; None if unknown."""
        if shutil.which("loginctl", path=self._environ.get("PATH")) is None:
            return None
        done = self._run("loginctl", "show-user", getpass.getuser(), "--property=Linger")
        return {"Linger=yes": True, "Linger=no": False}.get(done.stdout.strip())

    def _must(self, *words: str) -> str:
        done = self._call(*words)
        if done.returncode != 0:
            called = " ".join(("systemctl --user", *words))
            raise NimbleError(f"{called}: exit code {done.returncode}: {_reason(done) or 'no output'}")
        return done.stdout

    def _call(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self._run("systemctl", "--user", "--no-pager", *words)

    def _run(self, *words: str) -> subprocess.CompletedProcess[str]:
        program = shutil.which(words[0], path=self._environ.get("PATH")) or words[0]
        try:
            return subprocess.run(  # noqa: S603  # systemd's own programs, with words of ours
                [program, *words[1:]],
                env=self._environ | {"LC_ALL": "C.UTF-8"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as e:
            raise NimbleError(f"{' '.join(words)}: no answer after {_LIMIT_S:g} s") from e
        except OSError as e:
            raise NimbleError(f"{program}: {e.strerror}") from e


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """The first line of its output."""
    return next((line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()), "")


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0
