"""Modes over torch's operators leave the compiler alone: they do not import it, and it does not look into them."""

from __future__ import annotations

from tests import prefork

CODE = """
import sys
import torch
from nimble_jobs.engine.private.modes import DispatchMode

class Names(DispatchMode):
    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.seen.append(str(op))
        return op(*args, **(kwargs or {}))

with Names() as before:
    torch.zeros(2).sin()
assert before.seen == ["aten.zeros.default", "aten.sin.default"], before.seen
assert not {"torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules), "a mode needs no compiler"

frames = []

def backend(graph, inputs):
    frames.append(graph)
    return graph.forward

compiled = torch.compile(torch.cos, backend=backend)
with Names() as after:
    compiled(torch.zeros(2))
    torch.zeros(2).sin()
assert after.seen[-2:] == ["aten.zeros.default", "aten.sin.default"], after.seen
assert len(frames) <= 1, "the compiler looked into the mode"
"""


def test_a_mode_does_not_import_the_compiler_and_is_not_compiled() -> None:
    """In a fresh process: first without torch.compile, then with it."""
    done = prefork.run_light(CODE, check=False)
    assert done.returncode == 0, done.stderr
