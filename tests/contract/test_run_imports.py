"""A `run` that finds its schedule imports nothing that only a build needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests import prefork

SPEC = """\
version: 1
name: light
kind: score
model: {source: "torchvision:squeezenet1_1"}
input: {source: x.npy, format: npy, batch_size: 1}
output: {path: out, format: parquet, fields: [top1], if_exists: replace}
schedule: {fuse: "off", streams: 1, in_flight: 1, progressive: false}
run: {device: cpu}
"""
COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd", "torch.onnx", "sympy", "triton")
CODE = """
import json, sys
from nimble_jobs.cli.main import main
code = main(sys.argv[1:])
print(json.dumps([code, sorted(sys.modules)]))
"""


def test_a_stored_hit_imports_no_compiler(tmp_path: Path) -> None:
    """The second run of a small model; the first one has built its schedule."""
    np.save(tmp_path / "x.npy", np.zeros((2, 3, 32, 32), np.float32))
    (tmp_path / "s.yaml").write_text(SPEC)
    command = [sys.executable, "-c", CODE, "--home", str(tmp_path / "home"), "run", str(tmp_path / "s.yaml"), "--json"]
    for hit, run in (("miss", prefork.run), ("stored", subprocess.run)):
        done = run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
        *job, last = done.stdout.splitlines()
        code, modules = json.loads(last)
        assert (code, json.loads("\n".join(job))["schedule"]["hit"]) == (0, hit)
    assert [name for name in COMPILERS if name in modules] == []
