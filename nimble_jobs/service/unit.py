"""The text of a systemd unit that runs a worker, quoted by systemd's rules.

A database's address with a password does not stand in the unit, whose variables `systemctl show` and `systemctl cat`
print, but in a file beside it.

Source: systemd.service(5), "Command lines"; systemd.exec(5), `Environment=`, `EnvironmentFile=`; systemd.syntax(7),
"Quoting"; systemd.unit(5), "Specifiers".
"""

from __future__ import annotations

import hashlib
import math
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nimble_jobs.errors import UsageError
from nimble_jobs.settings.fields import with_stars, without_password

_MARGIN_S = 30.0  # beyond the grace period: the last writes, and the end of the child process
_KEPT = ("PATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "TORCH_HOME", "XDG_CACHE_HOME")
_OURS = "NIMBLE_JOBS_"
_HOME = "NIMBLE_JOBS_HOME"
_DATABASE = "NIMBLE_JOBS_DB"
_NOT_IN_NAME = re.compile(r"[^A-Za-z0-9]+")


@dataclass(frozen=True, kw_only=True)
class Service:
    """The worker of one state folder, as a service."""

    home: Path  # absolute
    grace_s: float  # time for its job to reach a safe point
    device: str | None = None  # None: read from config.yaml at each start
    devices: str | None = None  # instead of `device`: all, or a list
    gpu_memory_bytes: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)  # in addition to NIMBLE_JOBS_HOME
    python: str = sys.executable  # absolute

    @property
    def name(self) -> str:
        """The unit's name, different for each state folder."""
        digest = hashlib.sha256(str(self.home).encode("utf-8", "surrogateescape")).hexdigest()[:8]
        words = [part for part in (_NOT_IN_NAME.sub("-", p).strip("-").lower() for p in self.home.parts[-2:]) if part]
        return f"nimble-jobs-{'-'.join([*words, digest])[-80:].strip('-')}.service"

    @property
    def secrets_name(self) -> str:
        """The name of the file beside the unit that holds the variables with a password."""
        return f"{self.name.removesuffix('.service')}.env"

    @property
    def command(self) -> list[str]:
        """The command, with this interpreter's path, so that PATH does not matter."""
        words = [self.python, "-P", "-m", "nimble_jobs.worker", "--home", str(self.home)]
        if self.device is not None:
            words += ["--device", self.device]
        if self.devices is not None:
            words += ["--devices", self.devices]
        if self.gpu_memory_bytes is not None:
            words += ["--gpu-memory-bytes", str(self.gpu_memory_bytes)]
        return words

    @property
    def stop_s(self) -> int:
        """Seconds from SIGTERM to SIGKILL."""
        return math.ceil(self.grace_s + _MARGIN_S)

    def files(self, *, hidden: bool = False) -> dict[str, str]:
        """Names and texts of the unit file and, if there is a password, of the file that holds it.

        With `hidden`, *** stands for the password. Raises UsageError as `text` does.
        """
        secrets = "".join(
            f"{name}={_shell_quoted(with_stars(value) if hidden else value)}\n"
            for name, value in self.environment.items()
            if _has_password(name, value)
        )
        return {self.name: self.text()} | ({self.secrets_name: secrets} if secrets else {})

    def text(self) -> str:
        """The unit file, without passwords. Raises UsageError for paths and variables that a unit file cannot hold."""
        plain = {name: value for name, value in self.environment.items() if not _has_password(name, value)}
        variables = {_HOME: str(self.home), **plain}
        # %E is the folder in which systemd looks for units of users. A path would have to be escaped as a pattern.
        secrets = [f"EnvironmentFile=%E/systemd/user/{self.secrets_name}"] if len(plain) < len(self.environment) else []
        lines = [
            "# Written by `nimble-jobs worker service install`, which replaces it.",
            "[Unit]",
            f"Description=nimble-jobs worker of {_shown(str(self.home))}",
            "StartLimitIntervalSec=600",
            "StartLimitBurst=5",
            "",
            "[Service]",
            "Type=exec",
            "# The colon keeps systemd from replacing $NAME in it.",
            "ExecStart=:" + " ".join(_quoted(word) for word in (*_shell(self.python), *self.command)),
            *(f"Environment={_quoted(f'{name}={value}')}" for name, value in variables.items()),
            *secrets,
            "Restart=on-failure",
            "RestartSec=10",
            "# Bad usage or a bad configuration: starting again would not help.",
            "RestartPreventExitStatus=2",
            "# SIGTERM goes to the supervisor alone, which lets its job reach a safe point.",
            "KillMode=mixed",
            f"TimeoutStopSec={self.stop_s}",
            "# The kernel may kill the process that runs jobs for its memory; the supervisor starts another.",
            "OOMPolicy=continue",
            "UMask=0077",
            "",
            "[Install]",
            "WantedBy=default.target",
        ]
        return "\n".join(lines) + "\n"

    def by_hand(self) -> str:
        """Instructions to run it without systemd, with *** for a password."""
        shown = {
            name: with_stars(value) if _has_password(name, value) else value for name, value in self.environment.items()
        }
        variables = {_HOME: str(self.home), **shown}
        words = " ".join(
            [*(f"{name}={shlex.quote(value)}" for name, value in variables.items()), shlex.join(self.command)]
        )
        crontab = words.replace("%", r"\%")
        return (
            "Run this command in a shell with another service manager. Start it again when it exits\n"
            "with another code than 0 or 2. Stop it with SIGTERM to its first process, and with SIGKILL after "
            f"{self.stop_s} s:\n\n  exec env {words}\n\n"
            "With cron, it begins at each start of the machine if `crontab -e` gets this line:\n\n"
            f"  @reboot {crontab}\n"
        ) + (
            f"\nThe password in {_DATABASE} is not shown. Put it into ~/.pgpass, and leave :*** out of the address.\n"
            if shown != self.environment
            else ""
        )


def environment_of(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that a service keeps from its installation: our settings, and search paths."""
    ours = {name: value for name, value in environ.items() if name.startswith(_OURS) and name != _HOME}
    return {name: environ[name] for name in _KEPT if environ.get(name)} | dict(sorted(ours.items()))


def _has_password(name: str, value: str) -> bool:
    return name == _DATABASE and without_password(value) != value


def _shell(program: str) -> tuple[str, ...]:
    """The words before a program whose name systemd refuses as the first word of a command."""
    safe = program.isprintable() and not _REFUSED & set(program)
    return () if safe else ("/bin/sh", "-c", 'exec "$0" "$@"')


def _shell_quoted(text: str) -> str:
    """A value in an environment file, which systemd reads as a shell would. An address holds printable letters only."""
    escaped = "".join(f"\\{letter}" if letter in '"\\`$' else letter for letter in text)
    return f'"{escaped}"'


def _quoted(text: str) -> str:
    """One word of a unit file. Raises UsageError for bytes that are not UTF-8, or a NUL."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise UsageError(f"{_shown(text)}: has bytes that are not UTF-8, which a unit file cannot hold") from e
    if "\0" in text:
        raise UsageError(f"{_shown(text)}: has a NUL byte, which a unit file cannot hold")
    escaped = "".join(_ESCAPES.get(letter) or _plain(letter) for letter in text)
    return f'"{escaped}"'


_REFUSED = set("\"'\\")
_ESCAPES = {"\\": "\\\\", '"': '\\"', "%": "%%", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def _plain(letter: str) -> str:
    return letter if letter.isprintable() else "".join(f"\\x{byte:02x}" for byte in letter.encode())


def _shown(text: str) -> str:
    """The text for a line that users read."""
    plain = "".join(letter if letter.isprintable() else "?" for letter in text.encode("utf-8", "replace").decode())
    return plain.replace("%", "%%")
