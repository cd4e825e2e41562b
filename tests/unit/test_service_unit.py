"""The unit file of a worker: what systemd reads in it, whatever the paths are called."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from nimble_jobs.errors import UsageError
from nimble_jobs.service import Service, environment_of
from tests.waiting import PATIENCE_S

ODD = (
    *(
        "plain",
        "two words",
        'quo"te',
        "apo'strophe",
        "per%cent %h",
        "dol$lar $HOME ${HOME}",
        "back\\slash \\x41",
        "ünï",
    ),
    *("semi;colon ; x", "equals=sign", "-dash", "#hash", "tab\tline\nend"),
)


def service(home: Path, **values: object) -> Service:
    return Service(home=home, grace_s=60.0, **values)  # type: ignore[arg-type]


def words_of(line: str) -> list[str]:
    """A value as systemd splits and unescapes it: an independent reading of systemd.syntax(7)."""
    words, word, inside, at = [], "", False, 0
    while at < len(line):
        letter = line[at]
        if letter == '"':
            inside = not inside
        elif letter == "\\":
            at += 1
            if line[at] == "x":
                word += bytes.fromhex(line[at + 1 : at + 3]).decode("latin-1")
                at += 2
            else:
                word += {"n": "\n", "t": "\t", "r": "\r"}.get(line[at], line[at])
        elif letter == "%":
            at += 1
            assert line[at] == "%", "a specifier"
            word += "%"
        elif letter == " " and not inside:
            words.append(word)
            word = ""
        else:
            word += letter
        at += 1
    assert not inside
    return [*words, word]


def lines_of(text: str, key: str) -> list[str]:
    return [line.removeprefix(f"{key}=") for line in text.splitlines() if line.startswith(f"{key}=")]


@pytest.mark.parametrize("name", ODD)
def test_odd_paths_come_back_as_they_were(name: str) -> None:
    """In the command and in the environment."""
    made = service(Path("/home/me") / name, python=f"/opt/{name}/python", environment={"PATH": f"/{name}:/bin"})
    text = made.text()
    (command,) = lines_of(text, "ExecStart")
    assert command.startswith(":")
    words = words_of(command[1:])
    if words[0] == "/bin/sh":
        assert set(name) & set("\"'\\\n")
        assert words[1:3] == ["-c", 'exec "$0" "$@"']
        words = words[3:]
    assert words == made.command == [
        f"/opt/{name}/python", "-P", "-m", "nimble_jobs.worker", "--home", f"/home/me/{name}"
    ]  # fmt: skip
    variables = [words_of(line) for line in lines_of(text, "Environment")]
    assert variables == [[f"NIMBLE_JOBS_HOME=/home/me/{name}"], [f"PATH=/{name}:/bin"]]
    assert all(line.isprintable() for line in text.splitlines())


@pytest.mark.parametrize("name", ["\udc80", "nul\0"])
def test_what_no_unit_file_can_hold(name: str) -> None:
    """It is refused in words."""
    with pytest.raises(UsageError, match="which a unit file cannot hold"):
        service(Path("/home/me") / name).text()


def test_each_state_folder_has_its_own_unit() -> None:
    """Even those with equal names, and those that differ only in signs that a unit's name cannot have."""
    homes = ("/a/cache", "/b/cache", "/a/c ache", "/a/c_ache", "/a/" + "x" * 200, "/ü")
    names = [service(Path(home)).name for home in homes]
    assert len(set(names)) == len(homes)
    assert all(len(name) < 120 and name.replace("-", "").replace(".", "").isalnum() for name in names)
    assert names[0] == "nimble-jobs-a-cache-2c1d2633.service"


def test_the_stop_gives_a_job_its_grace() -> None:
    """systemd kills later than the worker itself gives up waiting for its job."""
    assert "TimeoutStopSec=90\n" in service(Path("/a")).text()
    assert Service(home=Path("/a"), grace_s=300.5).stop_s == 331


def test_the_environment_of_a_service() -> None:
    """Settings of ours and where programs are; nothing else of the shell's."""
    given = {
        "NIMBLE_JOBS_HOME": "/x",
        "NIMBLE_JOBS_DB": "postgresql://u:p@h/d",
        "PATH": "/bin",
        "SECRET": "s",
        "LANG": "",
    }
    assert environment_of(given) == {"PATH": "/bin", "NIMBLE_JOBS_DB": "postgresql://u:p@h/d"}


def database_in(file: Path) -> str:
    """The address that a shell reads in an environment file, which by systemd.exec(5) systemd reads alike."""
    command = ["/bin/sh", "-c", '. "$0" && printf %s "$NIMBLE_JOBS_DB"', str(file)]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=PATIENCE_S).stdout.decode()


@pytest.mark.parametrize("password", ["sekret", "s'ek\"ret", "s\\ek$HOME`x`%h", "s#;ek ret", "sé%40kret"])
def test_a_password_stands_in_a_file_of_its_own(tmp_path: Path, password: str) -> None:
    """The unit names that file and nothing of the password; stars stand for it in what is shown."""
    address = f"postgresql+psycopg://jobs:{password}@host/db"
    made = service(Path("/a"), environment={"PATH": "/bin", "NIMBLE_JOBS_DB": address})
    files = made.files()
    assert list(files) == [made.name, made.secrets_name]
    (tmp_path / "a.env").write_text(files[made.secrets_name])
    assert database_in(tmp_path / "a.env") == address
    assert lines_of(files[made.name], "EnvironmentFile") == [f"%E/systemd/user/{made.secrets_name}"]
    assert lines_of(files[made.name], "Environment") == ['"NIMBLE_JOBS_HOME=/a"', '"PATH=/bin"']
    stars = address.replace(password, "***")
    assert made.files(hidden=True) == {made.name: files[made.name], made.secrets_name: f'NIMBLE_JOBS_DB="{stars}"\n'}
    by_hand = made.by_hand()
    assert password not in files[made.name] + by_hand
    assert f"NIMBLE_JOBS_DB='{stars}'" in by_hand
    assert "Put it into ~/.pgpass" in by_hand


def test_an_address_without_a_password_stands_in_the_unit() -> None:
    """There is no second file then."""
    made = service(Path("/a"), environment={"NIMBLE_JOBS_DB": "postgresql+psycopg://jobs@host/db"})
    assert made.files() == {made.name: made.text()} == made.files(hidden=True)
    assert '"NIMBLE_JOBS_DB=postgresql+psycopg://jobs@host/db"' in lines_of(made.text(), "Environment")
    assert "EnvironmentFile" not in made.text()
    assert "pgpass" not in made.by_hand()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("name", ODD[:-1])
def test_systemd_takes_it(tmp_path: Path, name: str) -> None:
    """systemd itself reads the file without a word, and finds the interpreter by its odd name."""
    folder = tmp_path / name
    folder.mkdir()
    (folder / "python").symlink_to("/bin/true")
    variables = {"PATH": f"{folder}:/bin", "NIMBLE_JOBS_DB": "postgresql+psycopg://jobs:sekret@host/db"}
    made = service(folder, python=str(folder / "python"), environment=variables)
    path = tmp_path / made.name
    path.write_text(made.text())
    command = ["systemd-analyze", "verify", "--man=no", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    own = [line for line in done.stderr.splitlines() if made.name in line]
    assert own == []
