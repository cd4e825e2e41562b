"""transformers comes without what no forward pass needs, and all of it is there for whoever asks."""

from __future__ import annotations

import importlib.metadata
import json
import os
from pathlib import Path

import pytest

import nimble_jobs.models.transformers_import as light
from tests import prefork
from tests.text_models import write_bert

START = """
import json, sys
from pathlib import Path
import torch
import nimble_jobs.models.transformers_import as light
folder = Path(sys.argv[1])
late = ("torch._dynamo", "sympy", "scipy", "sklearn", "torch.distributed.tensor", "torch.distributed.fsdp",
        "torch.distributed.checkpoint", "huggingface_hub.hf_api", "jinja2")
def early():
    return [name for name in late if name in sys.modules]
"""

USES = """
import importlib.metadata
as_usual = importlib.metadata.packages_distributions
light.import_transformers(folder)
assert importlib.metadata.packages_distributions is as_usual
assert "transformers.models.bert.modeling_bert" in sys.modules and not early(), early()

# A model is built without the rest, and its class is found without reading the names of all others.
from nimble_jobs.models.build import build
from nimble_jobs.spec import ModelSpec
model = build(ModelSpec(source=f"transformers:{folder}"))
assert type(sys.modules["transformers"]).__name__ == "Incomplete" and not early(), early()
expected = model(torch.tensor([[2, 5, 3]]))["last_hidden_state"]

# Names that stand for others: nothing is an instance of a class before it is there, and then they are gone.
from transformers.distributed import sharding_utils, utils
from transformers.generation.continuous_batching import cache
from transformers.loss import loss_for_object_detection as losses
if hasattr(sharding_utils, "DTensor"):
    assert type(sharding_utils.DTensor).__name__ == "Name" and not isinstance(model, sharding_utils.DTensor)
assert not utils.is_dtensor(torch.zeros(1)) and not early(), early()
rows, columns = losses.linear_sum_assignment(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
assert columns.tolist() == [1, 0]
import scipy.optimize
assert losses.linear_sum_assignment is scipy.optimize.linear_sum_assignment
import torch.distributed.tensor
assert getattr(sharding_utils, "DTensor", torch.distributed.tensor.DTensor) is torch.distributed.tensor.DTensor
assert scipy.__file__ and torch.distributed.tensor.__file__

# The compiler works, and knows what it was told about functions of transformers.
assert "torch._dynamo" not in sys.modules or sys.modules["torch._dynamo"].__file__
compiled = torch.compile(model, backend="eager")
assert torch.equal(compiled(torch.tensor([[2, 5, 3]]))["last_hidden_state"], expected)
from transformers.integrations import finegrained_fp8
from transformers import AutoModel, BertForMaskedLM, T5EncoderModel, pipeline
assert type(sys.modules["transformers"]).__name__ == "_LazyModule"
"""

MARKS = """
marks = light._Marks()
ran = []

@marks._disable
def quiet(x):
    ran.append(torch.compiler.is_compiling())
    return x + 1

@marks.own["assume_constant_result"]
def constant():
    return 2

assert quiet(1) == 2 and constant() == 2 and ran == [False]
import torch._dynamo
marks.apply(torch._dynamo)
assert constant._dynamo_marked_constant

def whole(x):
    return quiet(x) * constant()

assert torch.compile(whole, backend="eager")(torch.ones(1)) == 4 and ran == [False, False]
try:
    torch.compile(lambda x: whole(x) + 1, backend="eager", fullgraph=True)(torch.ones(1))
except torch._dynamo.exc.Unsupported:
    pass
else:
    raise AssertionError("a function that must not be compiled was")
"""

AS_USUAL = """
def broken(module):
    raise AttributeError("another transformers")

light._look_first = broken
light.import_transformers(folder)
import transformers
assert transformers.configuration_utils.__file__ and type(transformers).__name__ == "_LazyModule"
assert "torch._dynamo" in sys.modules and sys.modules["torch._dynamo"].__file__
assert not [finder for finder in sys.meta_path if type(finder).__name__ == "Later"]
"""

OTHER_VERSION = """
light._TESTED = {}
light.import_transformers(folder)
assert "torch._dynamo" in sys.modules and type(sys.modules["transformers"]).__name__ == "_LazyModule"
"""

NAMES = """
if sys.argv[2] == "light":
    light.import_transformers(folder)
import transformers, transformers.models
usual = sys.argv[2] != "light"
assert usual or type(transformers).__name__ == "Incomplete"
print(json.dumps([
    [sorted(dir(package)), sorted(set(package.__all__)), sorted(package._modules),
     sorted(package._class_to_module.items()),
     sorted((name, sorted(map(str, kinds))) for name, kinds in package._object_missing_backend.items())]
    for package in (transformers, transformers.models)
]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT."""
    return write_bert(tmp_path_factory.mktemp("bert") / "model")


def output(code: str, *words: str) -> str:
    """What a process prints that has imported torch alone."""
    done = prefork.run_light(START + code, *words, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("code", [USES, MARKS, AS_USUAL, OTHER_VERSION], ids=["uses", "marks", "failed", "version"])
def test_transformers_is_imported_lightly(folder: Path, code: str, request: pytest.FixtureRequest) -> None:
    """What is left out is there at its first use; a version that is unknown or fails is imported as usual."""
    if code is OTHER_VERSION and not request.config.getoption("--all"):
        pytest.skip("much as a version that fails; with --all")
    output(code, str(folder))


def test_all_names_of_transformers_are_found(folder: Path) -> None:
    """The same ones as if it had read its files at once."""
    quick, usual = (json.loads(output(NAMES, str(folder), how)) for how in ("light", "usual"))
    for mine, theirs in zip(quick, usual, strict=True):
        assert set(theirs[0]) - set(mine[0]) == set()
        assert mine[1:] == theirs[1:]


def test_the_packages_of_modules_are_those_that_python_finds() -> None:
    """But for files that start Python, which no module can be."""
    with light._quick_owners():
        quick = importlib.metadata.packages_distributions()
    usual = importlib.metadata.packages_distributions()
    assert {name: set(usual[name]) for name in usual} == {name: set(quick[name]) for name in usual}
    assert [name for name in quick if name not in usual and not name.startswith("_")] == []
