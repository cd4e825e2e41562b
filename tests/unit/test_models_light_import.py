"""torchvision comes without what no classifier needs, and all of it is there for whoever asks."""

from __future__ import annotations

from tests import prefork

LIGHT = """
import inspect
import sys
import torch
from nimble_jobs.models.build import build
from nimble_jobs.spec import ModelSpec

inspect.modulesbyfile.clear()
inspect._filesbymodname.clear()
build(ModelSpec(source="torchvision:resnet18"))
late = ("torch._dynamo", "torch.onnx", "torchvision.datasets", "torchvision.models.detection",
        "torchvision.models.quantization", "torchvision.models.video")
assert not inspect._filesbymodname, "a file was looked for among all modules"
found = [name for name in late if name in sys.modules]
assert not found, ("building a model imports none of it", found)

# Other models are found, and exported operators registered once.
import torchvision
told = []
torch.onnx.register_custom_op_symbolic = lambda name, *_: told.append(name)
assert torchvision.models.get_model_builder("resnet50") and "torchvision.models.video" not in sys.modules
torchvision.models.get_model("lraspp_mobilenet_v3_large", weights=None, weights_backbone=None)  # as a model file does
build(ModelSpec(source="torchvision:quantized_mobilenet_v2"))
build(ModelSpec(source="torchvision:r3d_18"))
assert told.count("torchvision::nms") == 1, told
assert "fcn_resnet50" in torchvision.models.list_models()
try:
    torchvision.models.get_model("no_such_model")
except ValueError as e:
    assert str(e) == "Unknown model no_such_model"

# The compiler works afterwards.
from torchvision.ops import roi_align
assert roi_align(torch.ones(1, 1, 8, 8), [torch.tensor([[0.0, 0.0, 4.0, 4.0]])], 2).shape == (1, 1, 2, 2)
import torchvision.ops.roi_align  # the function of that name hides the module
assert sys.modules["torchvision.ops.roi_align"].is_compile_supported("cpu") in (True, False)
assert sys.modules["torch._dynamo"].__file__, "a place holder was left behind"
assert torch.compile(torch.sin, backend="eager")(torch.zeros(1)) == 0
"""

PARTS = """
from nimble_jobs.models.torchvision_import import import_torchvision
import_torchvision()
import torchvision
assert torchvision.datasets.FakeData.__name__ == "FakeData"
assert torchvision.models.segmentation.fcn_resnet50.__name__ == "fcn_resnet50"
from torchvision.models import detection, video
assert detection.__file__ and video.__file__
from torchvision.models.optical_flow import raft_small
assert not hasattr(torchvision, "no_such_part") and not hasattr(torchvision.models, "no_such_part")
"""

AS_USUAL = """
import sys
from types import ModuleType
import nimble_jobs.models.torchvision_import as light
places = light._places
light._places = lambda: places() | {"torchvision.ops.boxes": ModuleType("torchvision.ops.boxes")}
light.import_torchvision()
import torchvision
assert torchvision.models.detection.__file__ and torchvision.datasets.__file__ and torchvision.ops.nms
assert sys.modules["torchvision.ops._register_onnx_ops"].__file__
"""


def test_torchvision_is_imported_lightly() -> None:
    codes = {
        "building a model imports none of it, and all of it is found later": LIGHT,
        "every part is there by its name": PARTS,
        "a torchvision that needs more is imported as usual": AS_USUAL,
    }
    for said, code in codes.items():
        done = prefork.run_light(code, check=False)
        assert done.returncode == 0, (said, done.stderr)
