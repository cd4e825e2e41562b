"""Which outputs of a model have a value for each token, found by two calls with texts of different lengths."""

from __future__ import annotations

import numpy as np
import torch

from nimble_jobs.engine.record import flatten_outputs
from nimble_jobs.errors import ModelError
from nimble_jobs.models.packed import Packed
from nimble_jobs.planner import Loaded
from nimble_jobs.planner.module.modes import eval_mode
from nimble_jobs.planner.module.restoring import restoring_state
from nimble_jobs.workloads.heads import KNOWN
from nimble_jobs.workloads.text.setup import TextSetup

_LENGTH = 12  # tokens of the longer text


def per_token(loaded: Loaded, setup: TextSetup, fields: tuple[str, ...]) -> frozenset[str]:
    """The outputs among `fields` whose second axis is as long as the padded text.

    No size is compared with the length of a bucket, which it may equal by chance. The model is left as it was. Raises
    ModelError for an output that depends on the length in another axis.
    """
    own = [field for field in fields if field not in KNOWN or field == "logits"]
    module = loaded.module
    if not own or not isinstance(module, Packed):
        return frozenset()
    longer = min(setup.limit, _LENGTH)
    with restoring_state(module, loaded.device) as state, eval_mode(module), torch.no_grad(), state.watching():
        short, long = (_shapes(loaded, module, setup, length) for length in (longer - 1, longer))
    found = set[str]()
    for name in own:
        if name not in long:
            continue  # the heads will say so
        axes = [axis for axis, (a, b) in enumerate(zip(short[name], long[name], strict=True)) if a != b]
        if axes not in ([], [1]):
            raise ModelError(
                f"output.fields: {name} has the shape {list(long[name])} for one text of {longer} tokens; expected "
                "no axis but the second to depend on the number of tokens"
            )
        if axes:
            found.add(name)
    return frozenset(found)


def _shapes(loaded: Loaded, module: Packed, setup: TextSetup, length: int) -> dict[str, tuple[int, ...]]:
    layout = setup.layout(length)
    values = {part.path: np.zeros((1, *part.stored), dtype=part.dtype) for part in layout.parts}
    values["attention_mask"][:] = length
    rows = torch.from_numpy(layout.pack(values)).to(loaded.device)
    packed = Packed(module.model, layout, loaded.request.model_dtype, loaded.device)
    return {name: tuple(tensor.shape) for name, tensor in flatten_outputs(packed(rows)).items()}
