"""Jobs over objects of a real server, and over the same files in a folder."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from nimble_jobs.data import fetched
from nimble_jobs.objects import Objects
from tests.cli import Cli

MODEL = """
import torch

class Double(torch.nn.Module):
    def forward(self, x):
        return 2 * x.float().reshape(len(x), -1)[:, :4]

def double():
    return Double()
"""
SPEC = """
version: 1
name: doubled
kind: score
model: {{source: "python:model.py:double"}}
input: {{source: "{source}", {input}, batch_size: 4}}
output: {{path: {out}, format: npy, fields: [id, logits], shard_size: 8, if_exists: replace}}
schedule: {{on_miss: eager}}
run: {{error_threshold: 0.5}}
"""


def upload(address: str, files: dict[str, bytes]) -> None:
    objects = Objects(address, whole_bucket=True)
    for name, data in files.items():
        objects.write(name, data)


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def jpeg(shade: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (shade, 2 * shade, 250 - shade)).save(file, "JPEG")
    return file.getvalue()


class Desk:
    """Runs the spec over local files and over objects."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.cli = folder, Cli(folder / "home", capsys)
        (folder / "model.py").write_text(MODEL)

    def run(self, source: str, input_: str, out: str, *options: str) -> Any:
        spec = self.folder / f"{out}.yaml"
        spec.write_text(SPEC.format(source=source, input=input_, out=self.folder / out))
        return self.cli("run", spec, "--allow-python", self.folder, *options)

    def results(self, out: str) -> list[list[Any]]:
        parts = sorted((self.folder / out).glob("*.npy"))
        return [np.load(part, allow_pickle=False).tolist() for part in parts]

    def event(self, kind: str) -> Any:
        with self.cli.store() as store:
            return [event for event in store.jobs.events() if event.kind == kind][-1]

    def copies(self) -> list[Path]:
        return list(fetched.held(self.folder / "home"))
