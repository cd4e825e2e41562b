"""Configurations with mistakes, and the exact lines that each must give."""

# ruff: noqa: E501 - each message stands on one line, as it is printed

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
cache: {size: 50GB, build_after: 10s, shared: /mnt/schedules}
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
tracing: {endpoint: "http://localhost:4318"}
database: postgresql+psycopg://jobs@db.example.org/jobs
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
_ENDPOINT = "expected an address such as http://localhost:4318, without user, password or query"
_ADDRESS = "expected an address such as https://hooks.example.org/new, or a variable such as ${HOOK_URL}"
_EVENTS = "expected failed, quarantined, missed, recovered or succeeded"
_CLOCK = "expected an hour of the day, UTC, such as 03:30, or off"
_HOST = "expected a host such as hooks.example.org, or localhost:8080"

# fmt: off
BAD_SETTINGS = (
    _bad("a list", "- device: cpu\n", "{file}:1: found a list; expected a mapping of fields"),
    _bad("a text", "device\n", "{file}:1: found 'device'; expected a mapping of fields"),
    _bad("not YAML", "limits: {grace: 5s\n", "{file}:2: not valid YAML: expected ',' or '}', but got '<stream end>'"),
    _bad("a tab", "limits:\n\tgrace: 5s\n", "{file}:2: found a tab; expected spaces"),
    _bad("a second document", "device: cpu\n---\ndevice: cuda\n", "{file}:2: a second document starts here; expected one document"),
    _bad("a key twice", "device: cpu\nlimits: {grace: 5s}\ndevice: cuda\n", "{file}:3: device: given twice, first on line 1; expected one value"),
    _bad("an anchor", "limits: &l {grace: 5s}\n", "{file}:1: limits: found the anchor &l; expected no anchors or aliases"),
    _bad("an alias", "limits: {grace: &g 5s, stall: *g}\n", "{file}:1: limits.grace: found the anchor &g; expected no anchors or aliases", "{file}:1: limits.stall: found the alias *g; expected the value itself"),
    _bad("a merge key", "limits: {<<: {grace: 5s}}\n", "{file}:1: limits: found a merge key; expected the fields themselves"),
    _bad("a tag", "device: !!python/name:os.system x\n", "{file}:1: device: found x with the tag !!python/name:os.system; expected a value without a tag"),
    _bad("bytes", b'device: \xff\n', "{file}:1: not UTF-8; expected UTF-8 text"),
    _bad("a version of the future", "version: 2\n", "{file}:1: version: found 2; expected 1"),
    _bad("a version in quotes", "version: '1'\n", "{file}:1: version: found '1'; expected 1"),
    _bad("a field with a typo", "limits: {gracee: 5s}\n", "{file}:1: limits.gracee: unknown field, did you mean grace?"),
    _bad("a field in the wrong section", "grace: 5s\n", "{file}:1: grace: unknown field, did you mean limits.grace?"),
    _bad("a field of nobody", "telemetry: true\n", "{file}:1: telemetry: unknown field; expected one of version, device, gpu_memory, allow_python, database, limits, queue, cache, retention, notify, tracing"),
    _bad("a database of another kind", "database: mysql://u:secret@h/d\n", "{file}:1: database: found an address of another kind; expected postgresql+psycopg://USER@HOST/NAME, or sqlite:////PATH"),
    _bad("a database with its password", "database: postgresql+psycopg://u:secret@h/d\n", "{file}:1: database: found a password; expected an address without one; the password belongs in ~/.pgpass or PGPASSWORD"),
    _bad("a database with its password among the options", "database: postgresql+psycopg://u@h/d?password=secret\n", "{file}:1: database: found a password; expected an address without one; the password belongs in ~/.pgpass or PGPASSWORD"),
    _bad("a database with a question mark in its password", "database: postgresql+psycopg://u:se?cret@h/d\n", "{file}:1: database: found a password; expected an address without one; the password belongs in ~/.pgpass or PGPASSWORD"),
    _bad("a section that is a number", "limits: 5\n", "{file}:1: limits: found 5; expected a mapping"),
    _bad("a section that is nothing", "limits:\n", "{file}:1: limits: is empty; expected a mapping"),
    _bad("a device that is none", "device: gpu0\n", "{file}:1: device: found 'gpu0'; expected auto, cpu, cuda or cuda:N"),
    _bad("a device that is a number", "device: 0\n", "{file}:1: device: found 0; expected text, in quotes"),
    _bad("memory without a unit that is known", "gpu_memory: 20 gigs\n", f"{{file}}:1: gpu_memory: found '20 gigs'; {_SIZE}"),
    _bad("no memory", "gpu_memory: 0\n", "{file}:1: gpu_memory: found 0; expected more than 0 bytes"),
    _bad("memory that is negative", "gpu_memory: -1\n", f"{{file}}:1: gpu_memory: found -1; {_SIZE}"),
    _bad("a folder that is a text", "allow_python: /srv/models\n", "{file}:1: allow_python: found '/srv/models'; expected a list"),
    _bad("a folder that is empty", "allow_python: ['']\n", "{file}:1: allow_python[0]: found an empty path; expected a path"),
    _bad("a folder of somebody's home", "allow_python: [~/models]\n", "{file}:1: allow_python[0]: found '~/models', but ~ is not expanded; expected an absolute path, or one relative to config.yaml"),
    _bad("a folder twice", "allow_python: [/srv/a, /srv/b, /srv/a]\n", "{file}:1: allow_python[2]: /srv/a is given twice; expected each once"),
    _bad("a folder that is a URL", "notify: {commands: ['https://example.org/x']}\n", "{file}:1: notify.commands[0]: found 'https://example.org/x', which is a URL; expected a local path"),
    _bad("a duration in words", "limits: {start: ten minutes}\n", f"{{file}}:1: limits.start: found 'ten minutes'; {_DURATION}"),
    _bad("a duration below nothing", "limits: {grace: -5s}\n", f"{{file}}:1: limits.grace: found '-5s'; {_DURATION}"),
    _bad("a duration that is true", "limits: {patience: true}\n", f"{{file}}:1: limits.patience: found true; {_DURATION}"),
    _bad("a duration beyond ten years", "limits: {patience: 4000d}\n", "{file}:1: limits.patience: found '4000d'; expected a duration between 0 and 3650d"),
    _bad("a limit of nothing", "limits: {start: 0}\n", "{file}:1: limits.start: found 0s; expected more than 0s"),
    _bad("a limit of nothing with a unit", "retention: {keep: 0s}\n", "{file}:1: retention.keep: found 0s; expected more than 0s"),
    _bad("a limit that must be there", "limits: {start: null}\n", f"{{file}}:1: limits.start: is empty; {_DURATION}"),
    _bad("a clock time read by others as a number", "retention: {daily: 3:30}\n", f"{{file}}:1: retention.daily: found '3:30'; {_CLOCK}"),
    _bad("a clock time that does not exist", "retention: {daily: '24:00'}\n", f"{{file}}:1: retention.daily: found '24:00'; {_CLOCK}"),
    _bad("a daily that is true", "retention: {daily: true}\n", f"{{file}}:1: retention.daily: found true; {_CLOCK}"),
    _bad("none of a name", "retention: {per_name: 0}\n", "{file}:1: retention.per_name: found 0; expected at least 1"),
    _bad("half of a name", "retention: {per_name: 1.5}\n", "{file}:1: retention.per_name: found 1.5; expected a whole number"),
    _bad("an age that is off", "queue: {aging: off}\n", f"{{file}}:1: queue.aging: found 'off'; {_DURATION}"),
    _bad(
        "an address without a folder",
        "cache: {shared: s3://bucket}\n",
        "{file}:1: cache.shared: found 's3://bucket', which names a whole bucket; expected a folder in it: "
        "s3://bucket/FOLDER",
    ),
    _bad("a cache of nothing", "cache: {size: 0B}\n", "{file}:1: cache.size: found 0; expected more than 0 bytes"),
    _bad("an endpoint without a scheme", "tracing: {endpoint: 'localhost:4318'}\n", f"{{file}}:1: tracing.endpoint: found 'localhost:4318'; {_ENDPOINT}"),
    _bad("an endpoint that is a file", "tracing: {endpoint: 'file:///tmp/x'}\n", f"{{file}}:1: tracing.endpoint: found 'file:///tmp/x'; {_ENDPOINT}"),
    _bad("an endpoint with a password", "tracing: {endpoint: 'http://me:secret@localhost:4318'}\n", f"{{file}}:1: tracing.endpoint: found an address that cannot be used; {_ENDPOINT}"),
    _bad("an endpoint with a query", "tracing: {endpoint: 'http://localhost:4318/?token=x'}\n", f"{{file}}:1: tracing.endpoint: found 'http://localhost:4318/?token=x'; {_ENDPOINT}"),
    _bad("an endpoint with a wrong port", "tracing: {endpoint: 'http://localhost:99999'}\n", f"{{file}}:1: tracing.endpoint: found 'http://localhost:99999'; {_ENDPOINT}"),
    _bad("an event that is none", "notify: {on: [failed, started]}\n", f"{{file}}:1: notify.on[1]: found 'started'; {_EVENTS}"),
    _bad("only an event that is none", "notify: {on: [fail]}\n", f"{{file}}:1: notify.on[0]: found 'fail'; {_EVENTS}"),
    _bad("an event by itself", "notify: {on: failed}\n", "{file}:1: notify.on: found 'failed'; expected a list"),
    _bad("no event", "notify: {on: []}\n", "{file}:1: notify.on: found an empty list; expected at least one item"),
    _bad("an event twice", "notify: {on: [failed, failed]}\n", "{file}:1: notify.on[1]: failed is given twice; expected each once"),
    _bad("an address without a scheme", "notify: {webhook: hooks.example.org/x, hosts: [hooks.example.org]}\n", f"{{file}}:1: notify.webhook: found 'hooks.example.org/x'; {_ADDRESS}"),
    _bad("an address of a file", "notify: {webhook: 'file:///etc/passwd'}\n", f"{{file}}:1: notify.webhook: found 'file:///etc/passwd'; {_ADDRESS}"),
    _bad("an address with a password", "notify: {webhook: 'https://me:secret@hooks.example.org/', hosts: [hooks.example.org]}\n", "{file}:1: notify.webhook: found an address with a user name or password; expected none, or a variable such as ${HOOK_URL}"),
    _bad("an address with a blank", "notify: {webhook: 'https://hooks.example.org/a b', hosts: [hooks.example.org]}\n", f"{{file}}:1: notify.webhook: found a character that is not allowed in an address; {_ADDRESS}"),
    _bad("an address with a port that is none", "notify: {ping: 'https://hc-ping.com:99999/x', hosts: [hc-ping.com]}\n", f"{{file}}:1: notify.ping: found an address that cannot be read; {_ADDRESS}"),
    _bad("a variable that is none", "notify: {webhook: 'https://hooks.example.org/$TOKEN', hosts: [hooks.example.org]}\n", "{file}:1: notify.webhook: found a $ without a variable's name; expected ${NAME}, or %24 for the character itself"),
    _bad("a variable that never ends", "notify: {webhook: 'https://hooks.example.org/${TOKEN', hosts: [hooks.example.org]}\n", "{file}:1: notify.webhook: found a $ without a variable's name; expected ${NAME}, or %24 for the character itself"),
    _bad("a host that is not listed", "notify: {webhook: 'https://hooks.example.org/x', hosts: [example.org]}\n", "{file}:1: notify.webhook: the host hooks.example.org is not allowed; expected a host of notify.hosts"),
    _bad("a port that is not listed", "notify: {ping: 'http://hc-ping.com:8000/x', hosts: [hc-ping.com]}\n", "{file}:1: notify.ping: the host hc-ping.com:8000 is not allowed; expected a host of notify.hosts"),
    _bad("a host with a scheme", "notify: {hosts: ['https://hooks.example.org']}\n", f"{{file}}:1: notify.hosts[0]: found 'https://hooks.example.org'; {_HOST}"),
    _bad("a host with a star", "notify: {hosts: ['*.example.org']}\n", f"{{file}}:1: notify.hosts[0]: found '*.example.org'; {_HOST}"),
    _bad("a host with port nothing", "notify: {hosts: ['example.org:0']}\n", f"{{file}}:1: notify.hosts[0]: found 'example.org:0'; {_HOST}"),
    _bad("a command as one text", "notify: {command: /opt/hooks/tell --quietly}\n", "{file}:1: notify.command: found '/opt/hooks/tell --quietly'; expected a list"),
    _bad("a command of nothing", "notify: {command: []}\n", "{file}:1: notify.command: found an empty list; expected at least one item"),
    _bad("a command with a variable", "notify: {command: [/opt/hooks/tell, '${TOKEN}'], commands: [/opt/hooks]}\n", "{file}:1: notify.command: found '${TOKEN}'; expected words without variables: the command gets the environment of the worker"),
    _bad("a command that is not allowed", "notify: {command: [/opt/hooks/tell], commands: [/srv/hooks]}\n", "{file}:1: notify.command: /opt/hooks/tell may not be run; expected a program in a folder of notify.commands"),
    _bad("a timeout of an hour", "notify: {timeout: 1h}\n", "{file}:1: notify.timeout: found 1h; expected at most 10m"),
    _bad("several at once", "device: gpu\nlimits: {grace: soon, stal: 1m}\nretention: {daily: noon}\n", "{file}:1: device: found 'gpu'; expected auto, cpu, cuda or cuda:N", f"{{file}}:2: limits.grace: found 'soon'; {_DURATION}", "{file}:2: limits.stal: unknown field, did you mean stall?", f"{{file}}:3: retention.daily: found 'noon'; {_CLOCK}"),
    _bad("a host that is wrong spoils no address", "notify: {webhook: 'https://a.example.org/', hosts: ['*.example.org']}\n", f"{{file}}:1: notify.hosts[0]: found '*.example.org'; {_HOST}"),
    BadSettings(name="a variable that is no duration", environ={'NIMBLE_JOBS_PATIENCE': 'forever'}, messages=(f"environment NIMBLE_JOBS_PATIENCE: limits.patience: found 'forever'; {_DURATION}",)),
    BadSettings(name="a list of a variable", environ={'NIMBLE_JOBS_NOTIFY_ON': 'failed,started'}, messages=(f"environment NIMBLE_JOBS_NOTIFY_ON: notify.on[1]: found 'started'; {_EVENTS}",)),
    BadSettings(name="a variable that is no YAML", environ={'NIMBLE_JOBS_ALLOW_PYTHON': '[a'}, messages=("environment NIMBLE_JOBS_ALLOW_PYTHON: allow_python: not valid YAML: expected ',' or ']', but got '<stream end>'",)),
    BadSettings(name="a variable that is a mapping", environ={'NIMBLE_JOBS_LIMITS_GRACE': '{a: 1}'}, messages=(f"environment NIMBLE_JOBS_LIMITS_GRACE: limits.grace: found a mapping; {_DURATION}",)),
    BadSettings(name="a host of a variable", environ={'NIMBLE_JOBS_NOTIFY_HOSTS': 'https://x'}, messages=(f"environment NIMBLE_JOBS_NOTIFY_HOSTS: notify.hosts[0]: found 'https://x'; {_HOST}",)),
    BadSettings(
        name="a variable with a typo",
        environ={"NIMBLE_JOBS_LIMITS_GRCE": "5s", "NIMBLE_JOBS_LIMITS_STALL": ""},
        messages=("environment NIMBLE_JOBS_LIMITS_GRCE: names no field, did you mean NIMBLE_JOBS_LIMITS_GRACE?",),
    ),
    BadSettings(name="an option that is no device", given={'device': 'gpu'}, messages=("command line --device: device: found 'gpu'; expected auto, cpu, cuda or cuda:N",)),
    BadSettings(name="an option that is no size", given={'gpu_memory': '20 gigs'}, messages=(f"command line --gpu-memory: gpu_memory: found '20 gigs'; {_SIZE}",)),
)
