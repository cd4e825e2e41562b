#!/usr/bin/env python3
"""Write docs/measurements/cache-commands.md: every `cache` command on ten schedules of five models, at two widths.

    python scripts/cache_transcript.py [--out FILE]

The commands run in tmux, in terminals of 80 and 120 columns, on copies of one state folder that is made for this on
the CPU. Needs tmux.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from nimble_jobs.planner import schedule_key
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve

OUT = Path(__file__).resolve().parents[1] / "docs" / "measurements" / "cache-commands.md"
WIDTHS = (80, 120)
TIMEOUT_S = 300
DAY_S = 86400
MODELS = ("resnet18", "squeezenet1_1", "mobilenet_v3_small", "shufflenet_v2_x0_5")
SPEC = """\
version: 1
name: {name}
kind: score
model: {{source: "{source}"}}
input: {{source: records.npz, format: npz, fields: {{x: x}}, batch_size: 8}}
schedule: {{progressive: false}}
output: {{path: out/{name}, format: npy, fields: [id, top1]}}
"""
NET = """\
import torch
from torch import nn

from blocks import block


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(block(3, 8), block(8, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))

    def forward(self, x):
        return self.layers(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])


def net():
    return Net()
"""
BLOCKS = """\
from torch import nn


def block(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())
"""
# What is done before a command, beside its words. KEY is the first schedule of net, STALE one that another torch made,
# HELD one that a worker holds.
STEPS: tuple[tuple[str, str], ...] = (
    ("", "cache ls"),
    ("", "cache ls --filter 'model=*net*' --filter 'size>50kB' --filter 'used>30d' --sort -size"),
    ("", "cache ls --filter state=stale"),
    ("", "cache ls --filter state=old"),
    ("", "cache ls -q --sort replay --limit 3"),
    ("", "cache ls --filter model=python:net.py:net --limit 1 --json"),
    ("", "cache show KEY"),
    ("", "cache why net.yaml"),
    ("", "cache why net.yaml input.batch_size=32"),
    ("edit", "cache why net.yaml"),
    ("", "cache build net.yaml --batch-size 1,8,16 --allow-python ."),
    ("", "cache stats"),
    ("", "cache size"),
    ("", "cache dir"),
    ("", "cache verify"),
    ("", "cache verify KEY --replay"),
    ("", "cache verify --replay --allow-python ."),
    ("", "cache export KEY STALE moved.zip"),
    ("", "--home elsewhere cache import moved.zip"),
    ("", "--home elsewhere cache import net.yaml"),
    ("", "cache export KEY one.zip"),
    ("", "--home elsewhere cache import one.zip"),
    ("", "--home elsewhere cache import one.zip"),
    ("", "cache rm HELD --yes"),
    ("", "cache rm KEY --dry-run"),
    ("", "cache rm KEY </dev/null"),
    ("", "cache rm KEY --yes"),
    ("", "cache prune --stale --unused-for 30d --dry-run"),
    ("", "cache prune --stale --yes"),
    ("", "cache prune --max-size 300kB --yes"),
    ("damage", "cache verify"),
    ("", "cache ls --filter state=quarantined"),
    ("", "cache prune --quarantined --yes"),
    ("", "cache prune --yes"),
    ("", "cache ls"),
)


def main() -> int:
    """Make the store, run every command, write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=OUT, help="the page to write (%(default)s)")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # the number of threads is part of the key
    with tempfile.TemporaryDirectory(prefix="nimble-jobs-") as temporary:
        folder = Path(temporary)
        prepare(folder / "made")
        runs = []
        for width in WIDTHS:
            copy = folder / f"at-{width}"
            shutil.copytree(folder / "made", copy)
            with open_store(resolve(str(copy / "home"))) as store, store.workers.hold({"role": "worker"}) as lease:
                held = next(e.key for e in store.schedules.list() if "squeezenet" in e.model)
                store.schedules.set_residents(lease.id, [held])
                runs.append([shown(copy, words.replace("HELD", held[:12]), before, width) for before, words in STEPS])
    options.out.write_text(page(runs))
    return 0


def prepare(folder: Path) -> None:
    """Specs of five models, and a state folder with two schedules of each: nine built here, one as if by another
    torch; some were used today, some long ago.
    """
    folder.mkdir()
    x = np.random.default_rng(0).standard_normal((64, 3, 32, 32), dtype=np.float32)
    np.savez(folder / "records.npz", x=x)
    (folder / "net.py").write_text(NET)
    (folder / "blocks.py").write_text(BLOCKS)
    for name, source in (*((m, f"torchvision:{m}") for m in MODELS), ("net", "python:net.py:net")):
        (folder / f"{name}.yaml").write_text(SPEC.format(name=name, source=source))
        sizes = "8" if name == "resnet18" else "1,8"
        command(folder, "cache", "build", f"{name}.yaml", "--batch-size", sizes, "--allow-python", ".")
    for _ in range(2):
        command(folder, "run", "net.yaml", "output.if_exists=replace", "--allow-python", ".")
    with open_store(resolve(str(folder / "home"))) as store:
        by_another_torch(store)


def by_another_torch(store: Store) -> None:
    """Add the first schedule again as if torch 2.10 had made it, and let four schedules look old."""
    first = store.schedules.list()[0]
    parts = first.parts | {"torch": "2.10.0+cpu"}
    schedule = dataclasses.replace(store.schedules.verified(first.key).load(), key=schedule_key(parts))
    store.schedules.save(schedule, parts=parts, now=time.time() - 40 * DAY_S)
    from nimble_jobs.job import Hit

    for days, entry in enumerate(store.schedules.list()[3:6]):
        store.schedules.touch(entry.key, Hit.STORED, time.time() - (20 + 20 * days) * DAY_S)


def command(folder: Path, *words: str) -> None:
    """A command line to its end, in the folder. Raises CalledProcessError."""
    line = [sys.executable, "-m", "nimble_jobs.cli.main", "--home", "home", *words]
    subprocess.run(line, cwd=folder, check=True)


def shown(folder: Path, words: str, before: str, width: int) -> tuple[str, str]:
    """What a terminal of that width shows of a command, and the command as its line shows it."""
    with open_store(resolve(str(folder / "home"))) as store:
        entries = [entry for entry in store.schedules.list() if entry.state == "ready"]
        stale = next((e.key for e in entries if e.parts["torch"].startswith("2.10")), "")
        net = next((e.key for e in entries if e.model.startswith("python:")), "")
        if before == "edit":
            (folder / "blocks.py").write_text(BLOCKS.replace("nn.ReLU()", "nn.SiLU()"))
        if before == "damage":
            damage(store, entries[-1].key)
    said = words.replace("KEY", net[:12]).replace("STALE", stale[:12])
    program = f"{sys.executable} -m nimble_jobs.cli.main" + ("" if "--home" in said else " --home home")
    socket, done = f"nimble-jobs-{secrets.token_hex(4)}", folder / "done"  # a server that ends must not be met again
    done.unlink(missing_ok=True)
    script = folder / "step.sh"
    script.write_text(f'cd {folder}\n{program} {said}\necho "exit code $?"\ntouch {done}\nsleep {TIMEOUT_S}\n')
    tmux = ["tmux", "-L", socket, "-f", "/dev/null"]
    subprocess.run([*tmux, "new-session", "-d", "-x", str(width), "-y", "160", f"sh {script}"], check=True)
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while not done.exists():
            if time.monotonic() > deadline:
                raise SystemExit(f"{said}: not finished after {TIMEOUT_S} s")
            time.sleep(0.05)
        time.sleep(0.2)  # what was written last reaches the screen
        screen = subprocess.run([*tmux, "capture-pane", "-p"], check=True, capture_output=True, text=True).stdout
    finally:
        subprocess.run([*tmux, "kill-server"], check=True)
    lines = [line.rstrip() for line in screen.rstrip().splitlines()]
    note = {"edit": "  # after blocks.py was edited", "damage": "  # after a bit was flipped in a stored text"}
    text = "\n".join(lines).replace(str(folder), "/home/user/work")
    return f"nimble-jobs {said}{note.get(before, '')}", text


def damage(store: Store, key: str) -> None:
    """Change one character of a stored schedule behind the store's back."""
    import sqlite3

    with sqlite3.connect(store.home / "nimble-jobs.db") as connection:
        connection.execute("UPDATE schedule_texts SET text = replace(text, 'aten', 'atem') WHERE key = ?", (key,))


def page(runs: list[list[tuple[str, str]]]) -> str:
    """The page: each command once, with what both terminals showed where that differs."""
    parts = [
        "# Every cache command, as terminals show it\n",
        "    python scripts/cache_transcript.py\n",
        "Ten schedules of five models, built on a CPU for images of 3x32x32; one of them looks as if another torch had",
        "built it. Each command ran in tmux terminals of 80 and 120 columns, on copies of one state folder; where both",
        "show the same it is printed once. The last line is the exit code. Other programs used the machine meanwhile:",
        "the times show how times are shown, and nothing else.\n",
        f"Python {platform.python_version()}; {time.strftime('%Y-%m-%d', time.gmtime())}.\n",
    ]
    for narrow, wide in zip(*runs, strict=True):
        parts.append(f"## `{narrow[0]}`\n")
        for width, (_, text) in zip(WIDTHS, (narrow, wide), strict=True):
            if narrow[1] == wide[1] and width != WIDTHS[0]:
                continue
            parts.append(f"{width} columns:\n" if narrow[1] != wide[1] else "")
            parts.append(f"```\n{text}\n```\n")
    return "\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    sys.exit(main())
