"""torchvision comes without torch's compiler, and its operators find the compiler when they ask for it."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
import torch
from nimble_jobs.models.build import build
from nimble_jobs.spec import ModelSpec
module = build(ModelSpec(source="torchvision:resnet18"))
assert "torch._dynamo" not in sys.modules, "the compiler was imported"
from torchvision.ops import roi_align
assert roi_align(torch.ones(1, 1, 8, 8), [torch.tensor([[0.0, 0.0, 4.0, 4.0]])], 2).shape == (1, 1, 2, 2)
import torchvision.ops.roi_align  # the function of that name hides the module
assert sys.modules["torchvision.ops.roi_align"].is_compile_supported("cpu") in (True, False)
assert sys.modules["torch._dynamo"].__file__, "a place holder was left behind"
assert torch.compile(torch.sin, backend="eager")(torch.zeros(1)) == 0
"""


def test_building_a_model_imports_no_compiler() -> None:
    """In a fresh process: a model is built without it, and the compiler works afterwards."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
