"""The commands about the configuration and about notifications, as users type them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import cast

import pytest

from nimble_jobs.cli.main import main
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.charge import Charge
from nimble_jobs.worker.process import Child
from tests.bad_specs import SCORE, lay_out
from tests.cli import Cli
from tests.configured import configure
from tests.receiver import Receiver, receiving


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(resolve(str(tmp_path / "home")), capsys)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


def spec(folder: Path, notify: str) -> Path:
    lay_out(folder)
    path = folder / "job.yaml"
    path.write_text(f"{SCORE}notify: {notify}\n")
    return path


def failed(cli: Cli, path: Path, error: str = "bad") -> str:
    """A job of the spec that ends badly; its id."""
    job = str(cli("submit", path).out.strip())
    with cli.store() as store:
        claimed = store.jobs.claim("w", device="cpu", now=time.time())
        assert claimed is not None
        store.jobs.fail(claimed.id, 1, error=error, retry=False, lost=False, now=time.time())
    return job


def test_show(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value with its origin; the JSON has values in seconds and bytes."""
    path = configure(cli.home, "cache: {size: 5GB}\nlimits:\n  grace: 90s\n")
    monkeypatch.setenv("NIMBLE_JOBS_DEVICE", "cpu")
    rows = {row["field"]: row for row in cli("config", "show", "--json").json}
    assert rows["limits.grace"] == {
        "field": "limits.grace",
        "value": 90.0,
        "origin": f"{path}:3",
        "variable": "NIMBLE_JOBS_LIMITS_GRACE",
    }
    assert (rows["device"]["value"], rows["device"]["origin"]) == ("cpu", "environment NIMBLE_JOBS_DEVICE")
    assert rows["retention.keep"]["origin"] == "default"
    lines = cli("config", "show").out.splitlines()
    assert f"limits.grace\t1m30s\t{path}:3\tNIMBLE_JOBS_LIMITS_GRACE" in lines
    assert f"cache.size\t5GB\t{path}:1\tNIMBLE_JOBS_CACHE_SIZE" in lines


def test_check_and_path(cli: Cli, tmp_path: Path) -> None:
    """`check` exits 0 where all is right and 2 with every problem where it is not; a file can be checked first."""
    path = cli.home / "config.yaml"
    assert cli("config", "path").out == f"{path}\n"
    answer = cli("config", "check")
    assert (answer.code, answer.lines) == (0, [f"{path}: no such file; every value is a default"])
    configure(cli.home, "limits: {grace: 90s}\n")
    assert cli("config", "check").lines == [f"{path}: valid"]
    draft = tmp_path / "draft.yaml"
    draft.write_text("limits: {grace: soon}\nretention: {per_name: 0}\n")
    draft.chmod(0o600)
    answer = cli("config", "check", draft)
    assert answer.code == 2
    assert [line.split(";")[0] for line in answer.lines] == [
        f"{draft}:1: limits.grace: found 'soon'",
        f"{draft}:2: retention.per_name: found 0",
    ]
    assert cli("config", "check").code == 0, "the draft is not in place"


def test_schema(cli: Cli) -> None:
    """It is JSON, and editors get a description of each field."""
    schema = cli("config", "schema").json
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) >= {"limits", "retention", "queue", "notify", "cache", "device"}


def test_commands_refuse_a_broken_file(cli: Cli, tmp_path: Path) -> None:
    """Whatever depends on it says every problem and does nothing; listings go on."""
    path = spec(tmp_path, "{on: [failed]}")
    configure(cli.home, "limits: {grce: 1s}\n")
    because = f"{cli.home}/config.yaml:1: limits.grce: unknown field, did you mean grace?"
    for command in (("submit", path), ("worker", "start"), ("config", "check"), ("config", "show")):
        answer = cli(*command)
        assert (answer.code, answer.lines) == (2, [because]), command
    assert cli("ls").code == 0
    assert because in cli("worker", "ls").err
    assert because in cli("doctor", "--no-device").out


@pytest.mark.parametrize("command", ["submit", "validate"])
def test_targets_that_are_not_allowed(cli: Cli, tmp_path: Path, command: str) -> None:
    """They are refused before anything is queued, with what would allow them."""
    path = spec(tmp_path, "{webhook: 'https://hooks.example.org/x', ping: '${PING}', command: [/bin/tell]}")
    answer = cli(command, path)
    assert answer.code == 2
    assert [line.partition(": ")[2] for line in answer.lines] == [
        "notify.webhook: the host hooks.example.org is not allowed; "
        "expected a host of notify.hosts in config.yaml: the list is empty",
        "notify.command: /bin/tell may not be run; allow its folder under notify.commands in config.yaml",
    ]
    assert cli("ls", "--json").json == []


def test_nobody_to_tell(cli: Cli, tmp_path: Path) -> None:
    """An `on` without anybody to tell is a mistake."""
    answer = cli("validate", spec(tmp_path, "{on: [failed]}"))
    assert "notify: names no target, and neither does config.yaml; expected webhook, command or ping" in answer.err


def test_ls_and_retry(cli: Cli, tmp_path: Path, receiver: Receiver) -> None:
    """What waits, and that nobody sends it; what was given up is in `doctor` and can be tried again."""
    configure(cli.home, f"notify: {{hosts: ['{receiver.host}'], give_up: 1ms}}")
    path = spec(tmp_path, f"{{webhook: '{receiver.url}/${{TOKEN}}'}}")
    job = failed(cli, path)
    answer = cli("notifications", "ls", "--json")
    (row,) = answer.json
    assert (row["event"], row["job"], row["state"], row["target"]) == (
        "failed",
        job,
        "pending",
        f"{receiver.url}/${{TOKEN}}",
    )
    assert "pending notifications are not sent, because no worker is running" in cli("notifications", "ls").err
    with cli.store() as store:
        from nimble_jobs.courier import Courier

        Courier(store, "test", environ={}).deliver()
    (row,) = cli("notifications", "ls", "--filter", "state=given_up", "--json").json
    assert row["error"] == "the variable TOKEN is not set in the environment of the sending process"
    doctor = cli("doctor", "--no-device")
    assert doctor.code == 100
    assert "1 given up; list them with: nimble-jobs notifications ls --filter state=given_up" in doctor.out
    assert cli("notifications", "retry").code == 2
    assert cli("notifications", "retry", "nothing").code == 102
    assert cli("notifications", "retry", row["id"][:5]).out == f"{row['id']}\n"
    assert cli("notifications", "retry", "--given-up").err == "no notification was given up\n"
    assert cli("notifications", "ls", "-q", "--filter", "state=pending").out == f"{row['id']}\n"


def test_a_trial(cli: Cli, tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every target gets a test at once, a switch none that counts; nothing is written; a failure exits 100."""
    assert cli("notifications", "test").code == 2
    url = receiver.url
    configure(cli.home, f"notify: {{hosts: ['{receiver.host}'], webhook: '{url}/${{TOKEN}}', ping: '{url}/ping'}}")
    monkeypatch.setenv("TOKEN", "secret-token")
    answer = cli("notifications", "test")
    assert (answer.code, answer.out) == (0, f"ping {url}/ping: delivered\nwebhook {url}/${{TOKEN}}: delivered\n")
    assert sorted(message.path for message in receiver.messages) == ["/ping/log", "/secret-token"]
    receiver.status = 500
    answer = cli("notifications", "test", spec(tmp_path, f"{{webhook: '{url}/own'}}"))
    assert answer.code == 100
    assert f"webhook {url}/own: answered 500 Answer" in answer.out
    assert cli("notifications", "ls", "--json").json == []


def test_help_needs_no_store(capsys: pytest.CaptureFixture[str]) -> None:
    """The groups explain themselves."""
    for group in ("config", "notifications"):
        assert main([group, "--help"]) == 0
        assert "Usage: nimble-jobs" in capsys.readouterr().out


def test_the_origin_is_json(cli: Cli) -> None:
    """Lists stay lists."""
    configure(cli.home, "notify: {hosts: [a.example.org]}\n")
    (row,) = [row for row in json.loads(cli("config", "show", "--json").out) if row["field"] == "notify.hosts"]
    assert row["value"] == ["a.example.org"]


def test_show_says_what_came_from_the_configuration(cli: Cli, tmp_path: Path, receiver: Receiver) -> None:
    """With the line that it stood on when the attempt began, and who was told; a spec's own value came from nowhere."""
    path = configure(cli.home, f"limits:\n  stall: 20m\nnotify: {{hosts: ['{receiver.host}']}}\n")
    job = str(cli("submit", spec(tmp_path, f"{{webhook: '{receiver.url}/x'}}")).out.strip())
    with cli.store() as store:
        charge = Charge(store, "0-w")
        assert charge.take(cast(Child, _Idle()), 0.0)
        store.jobs.fail(job, 1, error="bad", retry=False, lost=False, now=time.time())
    configure(cli.home, "# nothing any more\n")
    shown = cli("show", job, "--json").json
    assert shown["settings"] == {"run.stall": {"value": 1200.0, "origin": f"{path}:2"}}
    (notice,) = shown["notifications"]
    assert (notice["event"], notice["state"], notice["target"]) == ("failed", "pending", f"{receiver.url}/x")
    text = cli("show", job).out
    assert f"20m ({path}:2)" in text
    assert f"webhook {receiver.url}/x: pending" in text


class _Idle:
    """A child process that takes a job and does nothing."""

    device = "cpu"
    most_ranks = 1
    software: Mapping[str, str] = MappingProxyType({})

    def moved(self) -> bool:
        return False

    def run(self, job: object) -> None:
        pass
