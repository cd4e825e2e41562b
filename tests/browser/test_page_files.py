"""What the page is made of: no inline code, nothing from elsewhere, and uPlot as it was published."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tomllib
from importlib import resources
from pathlib import Path

import pytest

PAGE = resources.files("nimble_jobs.dashboard") / "page"
ROOT = Path(__file__).resolve().parents[2]
OWN = sorted(entry.name for entry in PAGE.iterdir() if entry.is_file())


def test_uplot_is_as_published() -> None:
    """The vendored files have the sums that VERSION notes, and the licence is beside them."""
    folder = PAGE / "uplot"
    head, *lines = (folder / "VERSION").read_text().splitlines()
    assert re.match(r"uPlot \d+\.\d+\.\d+, ", head)
    noted = {name: digest for digest, name in (line.split() for line in lines)}
    found = {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in folder.iterdir()}
    del found["VERSION"]
    assert noted == found
    assert "MIT" in (folder / "LICENSE").read_text()


def test_nothing_is_inline_and_nothing_comes_from_elsewhere() -> None:
    """The page obeys its own policy: no inline script, style or handler, no address but its own."""
    html = (PAGE / "index.html").read_text()
    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", html) == []
    for name in OWN:
        text = (PAGE / name).read_text()
        assert set(re.findall(r"https?://[^\s\"']+", text)) <= {"http://www.w3.org/2000/svg"}, name


def test_packages_hold_every_file_of_the_page() -> None:
    """Hatch packs what lies below the package, except what git ignores."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("no git checkout, so nothing is ignored")
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert built == {"packages": ["nimble_jobs"]}
    names = [str(path) for path in Path(str(PAGE)).rglob("*") if path.is_file()]
    command = ["git", "check-ignore", "--no-index", "--stdin"]
    ignored = subprocess.run(command, input="\n".join(names), cwd=ROOT, text=True, capture_output=True, check=False)
    assert (ignored.returncode, ignored.stdout, ignored.stderr) == (1, "", "")  # 1: none of them
    assert len(names) > len(OWN)


def test_text_never_becomes_markup() -> None:
    """No script parses markup or text as code."""
    forbidden = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|new Function")
    for name in OWN:
        if name.endswith(".js"):
            assert forbidden.findall((PAGE / name).read_text()) == [], name


def test_every_icon_that_is_used_is_there() -> None:
    """An icon without a drawing would be an empty place."""
    drawn = set(re.findall(r'<symbol id="i-(\w+)"', (PAGE / "index.html").read_text()))
    table = (PAGE / "parts.js").read_text().partition("const STATES = {")[2].partition("};")[0]
    used = set(re.findall(r'\["(\w+)", "', table))
    for name in OWN:
        for called, referred in re.findall(r'\bicon\("(\w+)"\)|href="#i-(\w+)"', (PAGE / name).read_text()):
            used.add(called or referred)
    assert used <= drawn, used - drawn
