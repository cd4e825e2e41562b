"""Hostile modules on a GPU, where streams and graphs are involved: state, aliasing, writes, several in flight."""

from __future__ import annotations

import copy

import pytest
import torch

from nimble_jobs import Nimble
from nimble_jobs.errors import UsageError
from tests.hazards import aliasing, control_flow, features, host_reads, inputs, outputs, state
from tests.hazards.case import CALLS, Case, Data
from tests.hazards.runner import end_of, seed

WHOLE = [*state.CASES, *aliasing.CASES]
CHOSEN = {
    "host-item", "host-tolist", "host-numpy_of", "host-asarray", "host-text", "host-copied_to_the_host",
    "host-moved_to_the_host", "host-loops_over_lengths", "host-branches_on_the_sum", "host-gathers_by_an_order",
    "host-reads_a_buffer_that_changes", "flow-weights_that_change_in_place", "flow-a_weight_that_is_replaced",
    "flow-a_weight_that_is_transposed_in_its_place", "outputs-inputs_among_its_outputs", "outputs-a_tensor_on_the_host",
    "outputs-a_float_of_its_values", "outputs-a_list_of_its_values", "inputs-Encoder", "inputs-Attention",
    "inputs-masked_mean", "inputs-inverted", "inputs-solved", "inputs-lstm", "inputs-without_elements",
    "features-a_custom_operator_that_writes", "features-autocast_in_forward", "features-vmap",
    "features-trains_a_step_in_forward", "features-spectral_norm",
}  # fmt: skip
OTHERS = [c for file in (host_reads, control_flow, outputs, inputs, features) for c in file.CASES if c.name in CHOSEN]
LAST = "state-cache_with_a_position_in_a_tensor"  # a device-side assert would take the tests after it along
# Eager moves a tensor of the host to the device at its first call and keeps it there; a replay leaves it where it lies.
MOVED_ONCE = "state-a_tensor_in_an_object"
ALL = sorted((c for c in [*WHOLE, *OTHERS] if c.name != MOVED_ONCE), key=lambda c: c.name == LAST)
COMPILED = {
    "state-counts_in_a_buffer", "state-moving_average", "state-differs_from_the_last_call_in_a_buffer",
    "aliasing-writes_into_a_view_of_its_input", "aliasing-writes_through_a_chain_of_views",
    "aliasing-returns_a_clone_before_it_writes",
}  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@pytest.mark.parametrize("case", ALL, ids=str)
def test_equal_or_refused(case: Case, device: torch.device) -> None:
    """As on a CPU: eager's outputs and state for five calls, or a refusal."""
    end = end_of(case, device, streams="auto")
    if case.recorded is not None:
        assert end.recorded is case.recorded, end.reason


@pytest.mark.parametrize("case", [c for c in WHOLE if c.name in COMPILED], ids=str)
def test_compiled(case: Case, device: torch.device) -> None:
    """Inductor's kernels, chosen or not, change nothing."""
    assert end_of(case, device, fuse="auto", streams="auto").recorded


def test_the_chosen_are_there() -> None:
    """No name above is misspelt."""
    assert {c.name for c in OTHERS} == CHOSEN
    assert {c.name for c in WHOLE} >= COMPILED | {LAST, MOVED_ONCE}


IN_FLIGHT = ["aliasing-returns_views_of_its_input", "aliasing-outputs_that_share_memory", "aliasing-splits_and_writes",
             "aliasing-writes_into_its_input"]  # fmt: skip


@pytest.mark.parametrize("name", IN_FLIGHT)
def test_several_in_flight(name: str, device: torch.device) -> None:
    """Calls on two streams at once do not meet in each other's memory."""
    case = next(c for c in aliasing.CASES if c.name == name)
    seed(0)
    module = case.make().to(device).eval()
    nimble = Nimble(module)
    nimble.prepare(case.call(Data(0, device)), fuse="off", in_flight=2, eager="reference")
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    calls = [case.call(Data(turn, device)) for turn in range(1, CALLS + 1)]
    given = copy.deepcopy(calls)
    torch.cuda.synchronize(device)
    found = []
    for turn, (args, kwargs) in enumerate(given * 4):
        with torch.cuda.stream(streams[turn % 2]):
            args, kwargs = copy.deepcopy((args, kwargs))
            found.append((nimble(*args, **kwargs), args))
    torch.cuda.synchronize(device)
    for turn, (output, args) in enumerate(found):
        own = copy.deepcopy(calls[turn % CALLS])
        with torch.no_grad():
            expected = module(*own[0], **own[1])
        for a, b in zip(torch.utils._pytree.tree_leaves((output, args)), torch.utils._pytree.tree_leaves(
            (expected, own[0])), strict=True):  # fmt: skip
            torch.testing.assert_close(a, b)


def test_what_writes_its_state_is_not_in_flight(device: torch.device) -> None:
    """Replays at the same time would write over what the others still read."""
    case = next(c for c in state.CASES if c.name == "state-moving_average")
    with pytest.raises(UsageError, match=r"^in_flight: found 2; expected 1, because the module writes"):
        Nimble(case.make().to(device).eval()).prepare(case.call(Data(0, device)), fuse="off", in_flight=2)
