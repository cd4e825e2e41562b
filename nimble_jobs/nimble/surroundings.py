"""What goes on around a call that no replay takes part in."""

from __future__ import annotations

import torch

from nimble_jobs.engine.private.modes import in_transform, saved_tensor_hooks
from nimble_jobs.errors import UsageError


class Unfit(UsageError):
    """This call cannot be replayed; a call of the module itself can do it."""


def refuse_surroundings(device: torch.device, *, training: bool) -> None:
    """Raises Unfit under autocast, inside of a transform, and with gradients if hooks wait for saved tensors."""
    if torch.is_autocast_enabled(device.type):
        raise Unfit("called under torch.autocast, which a schedule does not take into account")
    transform = in_transform()
    if transform is not None:
        raise Unfit(f"called inside {transform}, which cannot see into a replay; call the module itself there")
    if training and torch.is_grad_enabled() and saved_tensor_hooks():
        raise Unfit(
            "called under torch.autograd.graph.saved_tensors_hooks, which a replay would not run; "
            "call the module itself there"
        )
