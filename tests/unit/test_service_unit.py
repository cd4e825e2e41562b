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


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("name", ODD[:-1])
def test_systemd_takes_it(tmp_path: Path, name: str) -> None:
    """systemd itself reads the file without a word, and finds the interpreter by its odd name."""
    folder = tmp_path / name
    folder.mkdir()
    (folder / "python").symlink_to("/bin/true")
    made = service(folder, python=str(folder / "python"), environment={"PATH": f"{folder}:/bin"})
    path = tmp_path / made.name
    path.write_text(made.text())
    command = ["systemd-analyze", "verify", "--man=no", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    own = [line for line in done.stderr.splitlines() if made.name in line]
    assert own == []
