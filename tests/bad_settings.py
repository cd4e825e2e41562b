"""Configurations with mistakes, and the exact lines that each must give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

GOOD = """\
version: 1
device: cuda:1
gpu_memory: 20GB
allow_python: [/srv/models]
limits:
  start: 5m
  stall: 15m
  grace: 30s
  patience: 2h
queue: {aging: 30m}
cache: {size: 50GB}
retention: {keep: 14d, keep_failed: 60d, per_name: 100, logs: 7d, daily: "03:30"}
notify:
  on: [failed, missed]
  webhook: https://hooks.example.org/${HOOK_TOKEN}
  command: [/opt/hooks/tell, --quietly]
  ping: https://hc-ping.com/${CHECK_ID}
  hosts: [hooks.example.org, hc-ping.com, "localhost:8080"]
  commands: [/opt/hooks]
  timeout: 5s
  command_timeout: 2m
  give_up: 12h
"""


@dataclass(frozen=True, kw_only=True)
class BadSettings:
    """One config.yaml, or one environment or command line over it."""

    name: str
    text: str | bytes = ""
    messages: tuple[str, ...]  # {file} stands for the path of config.yaml, {home} for its folder
    environ: Mapping[str, str] = field(default_factory=dict)
    given: Mapping[str, str] = field(default_factory=dict)

    def write(self, home: Path) -> Path:
        """Write the file; return its path."""
        path = home / "config.yaml"
        path.write_bytes(self.text if isinstance(self.text, bytes) else self.text.encode())
        path.chmod(0o600)
        return path

    def lines(self, path: Path) -> list[str]:
        """The messages as they read for a file at `path`."""
        return [m.replace("{file}", str(path)).replace("{home}", str(path.parent)) for m in self.messages]


def _bad(name: str, text: str | bytes, *messages: str) -> BadSettings:
    return BadSettings(name=name, text=text, messages=messages)


_DURATION = "expected seconds or a duration such as 90, 5s, 10m, 2h or 1h30m"
_SIZE = "expected bytes or a size such as 512MiB or 20GB"
_ADDRESS = "expected an address such as https://hooks.example.org/new, or a variable such as ${HOOK_URL}"
_EVENTS = "expected failed, quarantined, missed, recovered or succeeded"

BAD_SETTINGS = (_bad("a list", "- device: cpu\n", "{file}:1: found a list; expected a mapping of fields"),)
