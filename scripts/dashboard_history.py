"""Makes a state folder with a real history, for pictures of the dashboard: every row comes from a real command.

It trains, scores and embeds the quick start's data, kills a training so that it resumes, lets a job fail on a broken
picture, damages a stored schedule, and keeps timers. A second run of the same folder adds to its history.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from datetime import date, timedelta
from pathlib import Path

import quickstart_data

ROOT = Path(__file__).resolve().parents[1]
NIMBLE = Path(sys.executable).with_name("nimble-jobs")

BROKEN = """\
version: 1
name: inbox-photos
kind: score
model: {source: "torchvision:resnet18", seed: 0}
input: {source: data/inbox, format: images, batch_size: 4, transform: {resize: 224, center_crop: 224, channels: 3}}
output: {path: ../out/inbox, format: parquet, fields: [id, top5], if_exists: replace}
"""

EVERY_OTHER_MINUTE = """\
version: 1
name: inbox-watch
kind: score
model: {source: "torchvision:resnet18", args: {num_classes: 10}, seed: 0}
input:
  source: data/new
  format: images
  only_new: {settle: 1s}
  batch_size: 4
  transform: {resize: 64, center_crop: 64, channels: 3}
output: {path: "../out/watch/{{ tick:%Y-%m-%dT%H%M }}", format: parquet, fields: [id, top1]}
schedule: {on_miss: eager}
cron: {expression: "*/2 * * * *"}
"""


class Folder:
    """The state folder `cache`, the specs `jobs` and the results `out` of one history."""

    def __init__(self, root: Path) -> None:
        self.root, self.jobs, self.home = root, root / "jobs", root / "cache"
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("NIMBLE_JOBS_")}
        self.environment |= {"NIMBLE_JOBS_HOME": str(self.home), "OMP_WAIT_POLICY": "passive"}

    def nimble(self, *arguments: str, may_fail: bool = False) -> str:
        """What a command printed."""
        print("$ nimble-jobs", *arguments, flush=True)
        done = subprocess.run(
            [NIMBLE, *arguments], cwd=self.root, env=self.environment, stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode and not may_fail:
            raise SystemExit(f"nimble-jobs {' '.join(arguments)}: exit code {done.returncode}")
        return done.stdout.strip()

    def write(self) -> None:
        """The quick start's specs and data, and those that are for this history alone."""
        data = self.jobs / "data"
        data.mkdir(parents=True, exist_ok=True)
        quickstart_data.digits(data)
        quickstart_data.photos(data)
        for spec in (ROOT / "jobs").glob("*.yaml"):
            shutil.copyfile(spec, self.jobs / spec.name)
        (self.jobs / "inbox-photos.yaml").write_text(BROKEN)
        (self.jobs / "inbox-watch.yaml").write_text(EVERY_OTHER_MINUTE)
        for folder in ("inbox", "new"):
            (data / folder).mkdir(exist_ok=True)
            shutil.copyfile(data / "photos" / "coffee.png", data / folder / "coffee.png")
            shutil.copyfile(data / "photos" / "rocket.jpg", data / folder / "rocket.jpg")
        whole = (data / "photos" / "china.jpg").read_bytes()
        (data / "inbox" / "cut-short.jpg").write_bytes(whole[: len(whole) // 3])
        (data / "inbox" / "not-a-picture.png").write_text("upload failed: quota exceeded\n")


def until(asked: str, folder: Folder, wanted: str, limit_s: float = 300.0) -> None:
    """Wait until a job's `phase` line holds `wanted`."""
    deadline = time.monotonic() + limit_s
    while (
        wanted
        not in subprocess.run(
            [NIMBLE, "logs", asked], env=folder.environment, capture_output=True, text=True, check=False
        ).stdout
    ):
        if time.monotonic() > deadline:
            raise SystemExit(f"job {asked}: its log does not say {wanted!r}")
        time.sleep(0.5)


def killed(folder: Folder, job: str) -> None:
    """Kill the worker that runs a job, as a lost machine would."""
    until(job, folder, "epoch: 3 of")
    workers = json.loads(folder.nimble("worker", "ls", "--json"))
    for worker in workers:
        os.kill(worker["pid"], signal.SIGKILL)


def damage(folder: Folder) -> None:
    """Change a letter of a stored schedule, as a bad disk would, and let the store notice.

    It is that of the photographs by fours, for which no later job asks, so that it stays quarantined.
    """
    with closing(sqlite3.connect(folder.home / "nimble-jobs.db")) as database, database:
        database.execute(
            "UPDATE schedule_texts SET text = replace(text, '\"tasks\"', '\"tasXs\"')"
            " WHERE key = (SELECT key FROM schedules"
            " WHERE mode = 'inference' AND model = 'torchvision:resnet50' ORDER BY created_at LIMIT 1)"
        )
    folder.nimble("cache", "verify", may_fail=True)


def backfilled(folder: Folder, timer: str, days: int) -> None:
    """Submit the jobs of a timer's last days, and wait until each tick has one."""
    past = [date.today() - timedelta(days=ago) for ago in (days, 1)]
    folder.nimble("cron", "backfill", timer, "--from", past[0].isoformat(), "--to", past[1].isoformat())
    deadline = time.monotonic() + 300.0
    while any(
        tick["outcome"] == "waiting" for tick in json.loads(folder.nimble("cron", "show", timer, "--json"))["ticks"]
    ):
        if time.monotonic() > deadline:
            raise SystemExit(f"timer {timer}: its ticks still wait")
        time.sleep(1)


def make(folder: Folder) -> None:
    """The whole history; leaves no worker behind."""
    folder.write()
    folder.nimble("worker", "start", "--detach", "--max-idle", "10m", "--device", "cpu")
    folder.nimble("cron", "add", "jobs/inbox-watch.yaml")
    folder.nimble("cron", "add", "jobs/photos-nightly.yaml")
    training = folder.nimble("submit", "jobs/digits-train.yaml", "train.epochs=6")
    killed(folder, training)
    folder.nimble("worker", "start", "--detach", "--max-idle", "10m", "--device", "cpu")
    score = folder.nimble("submit", "jobs/digits-score.yaml", "--after", training)
    photos = folder.nimble("submit", "jobs/photos.yaml")
    broken = folder.nimble("submit", "jobs/inbox-photos.yaml")
    folder.nimble("wait", training, score, photos, broken, may_fail=True)
    folder.nimble("wait", folder.nimble("submit", "jobs/digits-score.yaml"))
    folder.nimble("wait", folder.nimble("submit", "jobs/inbox-photos.yaml", "run.error_threshold=0.6"))
    folder.nimble("cron", "trigger", "photos-nightly")
    backfilled(folder, "photos-nightly", days=4)
    folder.nimble(
        "wait", folder.nimble("submit", "jobs/photos.yaml", "input.batch_size=8", "output.path=out/photos-by-8")
    )
    damage(folder)
    folder.nimble("worker", "stop")


def run_on(folder: Folder) -> str:
    """A worker with a long training, a job that waits for it, and a held one; the training's id."""
    folder.nimble("worker", "start", "--detach", "--max-idle", "10m", "--device", "cpu")
    training = folder.nimble("submit", "jobs/digits-train.yaml", "train.epochs=40", "name=digits-long")
    folder.nimble("submit", "jobs/digits-score.yaml", "--after", training)
    folder.nimble(
        "hold", folder.nimble("submit", "jobs/photos.yaml", "input.batch_size=2", "output.path=out/photos-by-2")
    )
    until(training, folder, "epoch: 5 of")
    return training


if __name__ == "__main__":
    make(Folder(Path(sys.argv[1])))
