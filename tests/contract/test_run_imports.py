"""A `run` that finds its schedule imports nothing that only a build, a training or another database needs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from tests import prefork, text_jobs, text_models

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
TEXTS = """\
version: 1
name: texts
kind: score
model: {source: "transformers:bert"}
input:
  source: texts.parquet
  format: text
  fields: {x: body, id: id}
  text: {buckets: [8, 16], tokens_per_batch: 64}
output: {path: out, fields: [id, embedding], pooling: mean, if_exists: replace}
schedule: {fuse: "off", streams: 1, in_flight: 1, progressive: false}
run: {device: cpu}
"""
COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd", "torch.onnx", "sympy", "triton")
OTHER_JOBS = ("nimble_jobs.workloads.training", "nimble_jobs.planner.step", "sqlalchemy.dialects.postgresql")
DISTRIBUTED = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint")
OTHER_USES = ("scipy", "sklearn", "pandas", "jinja2", "huggingface_hub.hf_api", "torchvision.datasets")
CODE = """
import json, sys
from nimble_jobs.cli.main import main
code = main(sys.argv[1:])
print(json.dumps([code, sorted(sys.modules)]))
"""


def modules_of_a_hit(folder: Path, spec: str) -> list[str]:
    """What the second run of a spec has imported; the first one has built its schedules."""
    (folder / "s.yaml").write_text(spec)
    words = ["--home", str(folder / "home"), "run", str(folder / "s.yaml"), "--json"]
    for hit in ("miss", "stored"):
        if hit == "miss":
            done = prefork.run(
                [sys.executable, "-c", CODE, *words], capture_output=True, text=True, check=True, cwd=folder
            )
        else:
            done = prefork.run_light(CODE, *words, cwd=folder)
        *job, last = done.stdout.splitlines()
        code, modules = json.loads(last)
        assert (code, json.loads("\n".join(job))["schedule"]["hit"]) == (0, hit)
    return [str(name) for name in modules]


def test_a_stored_hit_imports_no_compiler(tmp_path: Path) -> None:
    """Of a small model for images."""
    np.save(tmp_path / "x.npy", np.zeros((2, 3, 32, 32), np.float32))
    modules = modules_of_a_hit(tmp_path, SPEC)
    assert [name for name in (*COMPILERS, *OTHER_JOBS) if name in modules] == []


def test_a_stored_hit_of_texts_imports_what_a_forward_pass_needs(tmp_path: Path) -> None:
    """transformers would import all of these, and pyarrow would import pandas."""
    text_models.write_bert(tmp_path / "bert")
    text_jobs.write_texts(tmp_path / "texts.parquet", [*text_models.TEXTS, *text_models.TEXTS])
    modules = modules_of_a_hit(tmp_path, TEXTS)
    assert "transformers.models.bert.modeling_bert" in modules
    assert [name for name in (*COMPILERS, *DISTRIBUTED, *OTHER_USES, *OTHER_JOBS) if name in modules] == []
