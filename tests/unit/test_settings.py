"""config.yaml: defaults, what goes over what, where values come from, and files that change."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nimble_jobs.cli.config import text_of
from nimble_jobs.errors import SettingsError
from nimble_jobs.settings import Settings, Watched, check_file, json_schema, read_settings, variable
from nimble_jobs.settings.fields import with_stars, without_password
from tests.bad_settings import BAD_SETTINGS, GOOD, BadSettings

DAY_S = 86400.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A right configuration."""
    path = tmp_path / "config.yaml"
    path.write_text(GOOD)
    path.chmod(0o600)
    return path


def test_defaults_without_a_file(tmp_path: Path) -> None:
    """Without a file each value is the default, and says so."""
    settings = read_settings(tmp_path, environ={})
    assert settings.flat() == Settings().flat()
    assert settings.retention.keep == 30 * DAY_S
    assert settings.limits.grace == 60
    assert settings.notify.hosts == ()
    assert {settings.origin(field) for field in settings.flat()} == {"default"}


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "{}\n"])
def test_empty_file(path: Path, text: str) -> None:
    """A file without fields gives the defaults."""
    path.write_text(text)
    assert read_settings(path.parent, environ={}).flat() == Settings().flat()


def test_every_field(path: Path) -> None:
    """Each field of the file arrives, in seconds and bytes, with its line."""
    settings = read_settings(path.parent, environ={})
    assert settings.gpu_memory == 20 * 10**9
    assert settings.limits.start == 300
    assert settings.limits.stall == 900
    assert settings.limits.patience == 7200
    assert settings.queue.aging == 1800
    assert settings.cache.size == 50 * 10**9
    assert settings.cache.build_after == 10
    assert settings.retention.daily == "03:30"
    assert settings.notify.command == ("/opt/hooks/tell", "--quietly")
    assert settings.origin("limits.stall") == f"{path}:7"
    assert settings.origin("cache.size") == f"{path}:11"
    assert all(settings.origin(field) != "default" for field in settings.flat())
    assert check_file(path) == settings


def test_environment_over_file_and_command_line_over_both(path: Path) -> None:
    """The nearest wins, and each value says where it comes from."""
    environ = {"NIMBLE_JOBS_DEVICE": "cpu", "NIMBLE_JOBS_LIMITS_GRACE": "7s", "NIMBLE_JOBS_PATIENCE": "90"}
    settings = read_settings(path.parent, environ=environ, given={"device": "cuda", "gpu_memory": None})
    assert settings.device == "cuda"
    assert settings.origin("device") == "command line --device"
    assert settings.limits.grace == 7
    assert settings.origin("limits.grace") == "environment NIMBLE_JOBS_LIMITS_GRACE"
    assert settings.limits.patience == 90
    assert settings.origin("limits.patience") == "environment NIMBLE_JOBS_PATIENCE"
    assert settings.gpu_memory == 20 * 10**9
    assert settings.origin("gpu_memory") == f"{path}:3"


def test_empty_variable_is_none(path: Path) -> None:
    """A variable that is set to nothing overrides nothing."""
    assert read_settings(path.parent, environ={"NIMBLE_JOBS_DEVICE": ""}).device == "cuda:1"


def test_lists_in_the_environment(tmp_path: Path) -> None:
    """Folders are separated as in PATH, other lists by commas; folders may begin with ~ there."""
    environ = {
        "NIMBLE_JOBS_ALLOW_PYTHON": f"/srv/it's{os.pathsep}~/models",
        "NIMBLE_JOBS_NOTIFY_ON": "failed, recovered",
        "NIMBLE_JOBS_NOTIFY_HOSTS": "[Hooks.example.org]",
    }
    settings = read_settings(tmp_path, environ=environ)
    assert settings.allow_python == ("/srv/it's", str(Path("~/models").expanduser()))
    assert settings.notify.on == ("failed", "recovered")
    assert settings.notify.hosts == ("hooks.example.org",)


def test_each_field_has_a_variable_of_its_own() -> None:
    """No two fields share a variable, and the older names stay."""
    names = [variable(field) for field in Settings().flat()]
    assert len(set(names)) == len(names)
    assert variable("cache.size") == "NIMBLE_JOBS_CACHE_SIZE"
    assert variable("allow_python") == "NIMBLE_JOBS_ALLOW_PYTHON"
    assert variable("limits.patience") == "NIMBLE_JOBS_PATIENCE"


@pytest.mark.parametrize("bad", BAD_SETTINGS, ids=lambda bad: bad.name)
def test_bad_settings(bad: BadSettings, tmp_path: Path) -> None:
    """All problems come at once, one line each, with exit code 2."""
    path = bad.write(tmp_path)
    with pytest.raises(SettingsError) as caught:
        read_settings(tmp_path, environ=bad.environ, given=bad.given)
    assert str(caught.value).splitlines() == bad.lines(path)
    assert caught.value.exit_code == 2


def test_others_must_not_write_it(path: Path) -> None:
    """A configuration allows code to run, so one that others can write is refused."""
    path.chmod(0o620)
    with pytest.raises(SettingsError, match=r"config.yaml: others can write to it \(mode 0620\); expected mode 0600"):
        read_settings(path.parent)


def test_pipe_in_its_place(tmp_path: Path) -> None:
    """A pipe is refused and not waited for."""
    os.mkfifo(tmp_path / "config.yaml")
    with pytest.raises(SettingsError, match=r"config.yaml: a named pipe; expected a configuration in YAML"):
        read_settings(tmp_path)


def test_missing_file_to_check(tmp_path: Path) -> None:
    """A file that is to be checked must exist."""
    with pytest.raises(SettingsError, match="no such file"):
        check_file(tmp_path / "config.yaml")


def test_edited_file_is_seen(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process sees an edited file at its next look; a broken one leaves the last good values and says why."""
    monkeypatch.delenv("NIMBLE_JOBS_CACHE_BUILD_AFTER", raising=False)
    watched = Watched(path.parent)
    assert watched.now().limits.grace == 30
    path.write_text("limits: {grace: 5s}\n")
    assert watched.now().limits.grace == 5
    assert watched.problem is None
    path.write_text("limits: {grace: soon, x: 1}\n")
    assert watched.now().limits.grace == 5
    assert watched.problem is not None
    assert watched.problem.splitlines()[0].startswith(f"{path}:1: limits.grace: found 'soon'")
    path.unlink()
    assert watched.now().flat() == Settings().flat()
    assert watched.problem is None


def test_broken_from_the_start(path: Path) -> None:
    """Who never had good values gets none."""
    path.write_text("limits: []\n")
    watched = Watched(path.parent)
    for _ in range(2):
        with pytest.raises(SettingsError, match="found a list; expected a mapping"):
            watched.now()


def test_table_is_large_and_named_once() -> None:
    """The table holds at least sixty, each with a name and a mistake of its own, over a file that is right."""
    assert len(BAD_SETTINGS) >= 60
    assert len({bad.name for bad in BAD_SETTINGS}) == len(BAD_SETTINGS)
    assert len({(bad.text, str(bad.environ), str(bad.given)) for bad in BAD_SETTINGS}) == len(BAD_SETTINGS)


def test_schema_describes_every_field() -> None:
    """Editors get every section and field, each with one short sentence, and refuse what is unknown."""
    schema = json_schema()
    json.dumps(schema, allow_nan=False)
    sections = [schema, *schema["$defs"].values()]
    for section in sections:
        assert section["additionalProperties"] is False
        for name, field in section["properties"].items():
            target = schema["$defs"].get(field.get("$ref", "").rpartition("/")[2], {})
            description = field.get("description") or target["description"]
            assert description.endswith("."), name
            assert len(description) < 140, name
    fields = {
        f"{name}.{inner}" if "$ref" in field else name
        for name, field in schema["properties"].items()
        for inner in (schema["$defs"][field["$ref"].rpartition("/")[2]]["properties"] if "$ref" in field else [name])
    }
    assert fields - {"version"} == set(Settings().flat())
    assert schema["properties"]["version"]["const"] == 1


def test_the_page_has_every_field() -> None:
    """docs/configuration.md says of each field what its default is and what it means."""
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    for field, value in Settings().flat().items():
        assert f"| `{field}` | `{text_of(field, value)}` | " in page, field


def test_the_examples_of_the_pages(path: Path) -> None:
    """What the pages show is valid."""
    docs = Path(__file__).parents[2] / "docs"
    first = (docs / "configuration.md").read_text().split("```yaml\n")[1].split("```")[0]
    path.write_text(first)
    assert check_file(path).retention.daily == "03:30"
    parts = (docs / "notifications.md").read_text().split("```yaml\n")[1:3]
    notify, allowed = (part.split("```")[0].partition("notify:\n")[2] for part in parts)
    path.write_text(f"notify:\n{notify}{allowed}")
    assert check_file(path).notify.ping == "https://hc-ping.com/${CHECK_ID}"


@pytest.mark.parametrize("password", ["s?cret", "s/cret", "s@cret", "s:cret", "s&cret=1", "s#cret"])
def test_a_password_is_removed_whatever_it_holds(password: str) -> None:
    """Also where the address then cannot be used, because the variable is shown by `config show` before that."""
    address = f"postgresql+psycopg://user:{password}@host/name"
    assert without_password(f"{address}?sslmode=require") == "postgresql+psycopg://user@host/name?sslmode=require"
    assert with_stars(f"{address}?sslmode=require") == "postgresql+psycopg://user:***@host/name?sslmode=require"


def test_a_password_among_the_options() -> None:
    """Also if its name is written in another way."""
    address = "postgresql+psycopg://user@host/name?sslmode=require&pass%77ord=s3cret&SSLpassword=s3cret"
    assert without_password(address) == "postgresql+psycopg://user@host/name?sslmode=require"
    assert with_stars(address) == ("postgresql+psycopg://user@host/name?sslmode=require&pass%77ord=***&SSLpassword=***")


@pytest.mark.parametrize("user", ["user@corp", "us/er", "us?er"])
def test_a_password_is_removed_whatever_the_user_is(user: str) -> None:
    assert without_password(f"postgresql+psycopg://{user}:s3cret@host/name") == f"postgresql+psycopg://{user}@host/name"


@pytest.mark.parametrize(
    "rest",
    [
        "user@host:5432/name",
        "host/name?user=a%40b",
        "user@[::1]:5432/name",
        "/name",
        "@/n",
        "user@host:5432/name?application_name=a@b",
        "user@host/name?options=a:b@c",
        "//folder/a:b@c.db",
    ],
)
def test_an_address_without_a_password_stays_as_it_is(rest: str) -> None:
    assert without_password(f"postgresql+psycopg://{rest}") == f"postgresql+psycopg://{rest}"
    assert with_stars(f"postgresql+psycopg://{rest}") == f"postgresql+psycopg://{rest}"
