"""Moves weights side by side into memory of their own, so that the gaps between them go back to the device.

A search leaves weights in segments of the caching allocator that they share with tensors that are long gone.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from nimble_jobs.engine.device import able
from nimble_jobs.engine.record import state_of


def compact(module: nn.Module, device: torch.device) -> None:
    """Move every tensor that a module holds on a GPU. Values and strides stay; no graph may have captured an address.

    Tensors that share their storage stay where they are. On a CPU this does nothing.
    """
    if not able(device).separate_memory:
        return
    tensors = {id(t): t for t in state_of(module).values()}.values()
    uses = Counter(t.untyped_storage().data_ptr() for t in tensors)
    pool = torch.cuda.MemPool()
    with torch.inference_mode(False), torch.no_grad(), torch.cuda.use_mem_pool(pool, device):
        for tensor in tensors:
            whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
            alone = uses[tensor.untyped_storage().data_ptr()] == 1
            if not whole or not alone or not tensor.numel() or tensor.device != device:
                continue
            moved = tensor.detach().clone(memory_format=torch.preserve_format)
            if moved.stride() == tensor.stride():
                tensor.data = moved
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


def state_bytes(module: nn.Module) -> int:
    """Memory of a module's parameters and buffers; what several share counts once."""
    storages = (t.untyped_storage() for t in state_of(module).values())
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())
