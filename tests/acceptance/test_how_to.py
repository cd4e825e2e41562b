"""The pages of `docs/how-to/` run as they stand: the files are saved, the commands typed, in an empty folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import prefork

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "how-to"
PAGES = sorted(page.stem for page in FOLDER.glob("*.md") if page.stem != "README")
LIMIT_S = 240
COMMAND = str(Path(sys.executable).with_name("nimble-jobs"))

# A file to save (`Save this as NAME`, then a fence) or commands to type (a fence of kind sh).
_PART = re.compile(r"[Ss]ave this as `([^`]+)`[^`]*```\w+\n(.*?)```|```sh\n(.*?)```", re.DOTALL)

# What the commands of a page must have printed, so that a page whose commands stop doing their work fails.
PRINTED = {
    "answer-an-openai-batch-file": [
        '"custom_id":"faq-1"',
        '"custom_id":"faq-3"',
        "body.input: is empty; expected text",
    ],
    "carry-schedules": ["would import 1 schedule", "imported 1 schedule", "schedule.answer: hit"],
    "fine-tune-and-resume": ["resumed: continues after step", "stored hit"],
    "keep-the-store-small": ["nothing to remove", "limit      9.3 GiB for schedules"],
    "nightly-scoring": ["nightly: added", "manual, submitted as", "03.png"],
    "read-explain": ["graph.width: 2", "wrote timeline.svg", "key.input"],
    "score-a-table": ['{"id":"c-0000"'],
    "score-images": ["'id': '00.jpg'", '"id": "broken.jpg"'],
    "several-inputs": ['{"id":"p-000","risk":0.', "history.codes int16[8]"],
    "run-workers-in-kubernetes": ["  completions: 4", '"kueue.x-k8s.io/queue-name": gpus'],
    "run-workers-under-slurm": ["#SBATCH --signal=B:TERM@90", "--max-time 25m", "idle for 3 s", "succeeded"],
    "use-ray": [],  # its program is run on a cluster, by test_ray.py
    "watch-in-the-browser": ["?token=", "watched succeeded 256"],
    "scrape-metrics": ['nimble_jobs_jobs_due{kind="score"} 0.0'],
    "see-traces": ["tracing.endpoint", "http://127.0.0.1:4318"],
    "score-on-several-gpus": ["succeeded: 20,000 records", "devices.cpu: "],
    "several-models-on-one-gpu": ["\tresident\t", "uses.resident: 2 of 4"],
}


def lay_out_commands(folder: Path) -> None:
    """Commands of this environment whose processes are forked, unless all start cold."""
    folder.mkdir()
    for name, words in (("python", []), ("nimble-jobs", [COMMAND])):
        command = folder / name
        command.write_text(f'#!/bin/sh\nexec {shlex.join([*prefork.words(), *words])} "$@"\n')
        command.chmod(0o755)


def fork_in(script: str) -> str:
    """A command that edits a printed script, which names ours by its path and so would start it cold."""
    return shlex.join(["sed", "-i", f"s|exec {COMMAND} |exec {shlex.join([*prefork.words(), COMMAND])} |", script])


def parts_of(page: Path) -> list[tuple[str | None, str]]:
    """Files (name, text) and commands (None, text) of a page, in its order."""
    return [(name or None, text or commands) for name, text, commands in _PART.findall(page.read_text())]


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("name", PAGES)
def test_the_page_runs(name: str, tmp_path: Path) -> None:
    """Each command of the page exits with 0 where the page's files are all that there is."""
    folder = tmp_path / "empty"
    folder.mkdir()
    script = []
    for file, text in parts_of(FOLDER / f"{name}.md"):
        if file is None:
            script.append(text.replace("bash workers.sbatch\n", f"{fork_in('workers.sbatch')}\nbash workers.sbatch\n"))
        else:
            (folder / file).write_text(text)
    lay_out_commands(tmp_path / "bin")
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("NIMBLE_JOBS_")},
        "PATH": f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "NIMBLE_JOBS_HOME": str(tmp_path / "home"),
        "OMP_WAIT_POLICY": "passive",
    }
    try:
        done = subprocess.run(
            ["bash", "-euxo", "pipefail", "-c", "".join(script)],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
    finally:
        subprocess.run(["nimble-jobs", "worker", "stop"], env=environment, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stdout
    for line in PRINTED[name]:
        assert line in done.stdout, f"{line!r} is not in\n{done.stdout}"


def test_the_index_lists_every_page() -> None:
    """A page that the index does not name is never found."""
    listed = re.findall(r"\]\((.*?)\.md\)", (FOLDER / "README.md").read_text())
    assert sorted(listed) == PAGES


def test_links_lead_somewhere() -> None:
    """Each relative link of the guides, and of the pages that they lead to, names a file and one of its headings."""
    for page in [*FOLDER.glob("*.md"), *FOLDER.parent.glob("*.md"), FOLDER.parents[1] / "README.md"]:
        for target, _, heading in re.findall(r"\]\((?!https?:)([^)#]*)(#([^)]*))?\)", page.read_text()):
            path = (page.parent / target) if target else page
            assert path.exists(), (page.name, target)
            if heading:
                found = {_anchor(line) for line in re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)}
                assert heading in found, (page.name, target, heading)


def _anchor(heading: str) -> str:
    """The anchor that Markdown viewers give a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
