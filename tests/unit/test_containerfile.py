"""The container file: what hadolint says, and that it agrees with the rest of the project."""

from __future__ import annotations

import fnmatch
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from nimble_jobs.cli import worker_script

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Containerfile").read_text()
LINES = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE)).splitlines()
INSTRUCTIONS = [tuple(line.split(maxsplit=1)) for line in LINES if line]


def of_kind(kind: str) -> list[str]:
    """What follows these instructions, in order."""
    return [rest for each, rest in INSTRUCTIONS if each == kind]


def sources() -> list[list[str]]:
    """What each COPY brings."""
    return [words.split()[1:-1] for words in of_kind("COPY")]


def reaches_the_image(path: str) -> bool:
    """Whether .dockerignore lets a file in: the last pattern that matches it, or a folder above it, decides."""
    held = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!").removeprefix("**/")
        if not line or line.startswith("#"):
            continue
        names = [path, *(str(parent) for parent in Path(path).parents)]
        if any(fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(Path(name).name, pattern) for name in names):
            held = line.startswith("!")
    return held


def test_hadolint_finds_nothing() -> None:
    """It knows the traps of such files, and has shellcheck read the commands."""
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, "--no-color", ROOT / "Containerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_all_that_is_copied_exists_and_is_let_in() -> None:
    """Also what the installation needs before the code comes, and nothing of what a clone may hold beside."""
    for path in [path for words in sources() for path in words if path != "."]:
        assert (ROOT / path).is_file(), path
        assert reaches_the_image(path), path
    assert sources()[-1] == ["."]
    for path in ("nimble_jobs/store/migrations/env.py", "scripts/quickstart", "jobs/photos.yaml"):
        assert (ROOT / path).is_file(), path
        assert reaches_the_image(path), path
    for path in (".git/config", ".venv/bin/python", "cache/jobs.db", "jobs/data/photos/china.jpg", "out/x", ".env"):
        assert not reaches_the_image(path), path


def test_the_installation_is_that_of_the_quick_start() -> None:
    """It has only extras that exist, with pinned versions, and Python is one that the set-up takes."""
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    (setup,) = [command for command in of_kind("RUN") if "scripts/setup" in command]
    calls = [call.split() for call in setup.split(" && ")]
    assert all(call[0] == "scripts/setup" and set(call[1:]) <= extras for call in calls)
    assert calls[0] == ["scripts/setup", "quickstart"]
    assert "constraints.txt" in sources()[0]
    assert re.fullmatch(r"python:3\.1[12]-slim-\w+", of_kind("FROM")[0])


def test_it_is_not_root() -> None:
    """The user has the id that manifests name, and owns what is copied."""
    user = inspect.signature(worker_script.kubernetes).parameters["user_id"].default
    assert of_kind("USER") == [f"{user}:{user}"]
    assert all(words.startswith(f"--chown={user}:{user} ") for words in of_kind("COPY"))
    assert any(f"useradd --uid {user} --gid {user} " in command for command in of_kind("RUN"))
