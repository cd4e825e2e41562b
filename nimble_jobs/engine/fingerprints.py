"""Numbers that tell whether tensors were written, for far less than their memory."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from nimble_jobs.engine.device import able
from nimble_jobs.engine.private.modes import functions_off

_THREADS = 4  # more do not read faster from memory
_SMALL_BYTES = 1 << 20  # read sooner than threads start


@torch.no_grad()
def fingerprints(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """A number for each dense tensor, which other bits hardly ever have.

    In host memory it is a CRC-32, at some GB/s a thread. On a device it is the sum of the bits, which does not see
    values that swap places; all sums of a device are waited for at once.
    """
    found: dict[str, int] = {}
    on_host: dict[str, torch.Tensor] = {}
    sums: defaultdict[torch.device, dict[str, torch.Tensor]] = defaultdict(dict)
    with functions_off():
        for name, tensor in tensors.items():
            flat = _bytes(tensor)
            if able(flat.device).separate_memory:
                whole = torch.int32 if flat.numel() % 4 == 0 and flat.storage_offset() % 4 == 0 else torch.int8
                sums[flat.device][name] = flat.view(whole).sum()
            else:
                on_host[name] = flat
        for each in sums.values():
            found.update(zip(each, torch.stack(list(each.values())).tolist(), strict=True))
        if sum(flat.numel() for flat in on_host.values()) <= _SMALL_BYTES:
            found.update((name, _checksum(flat)) for name, flat in on_host.items())
        else:
            with ThreadPoolExecutor(max(1, min(_THREADS, torch.get_num_threads()))) as pool:
                found.update(zip(on_host, pool.map(_checksum, on_host.values()), strict=True))
    return found


def _checksum(flat: torch.Tensor) -> int:
    return zlib.crc32(flat.numpy().data)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [bytes], in the order of memory. A copy only if elements share memory, or have gaps between them."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    ordered = plain.permute(sorted(range(plain.dim()), key=lambda axis: -plain.stride()[axis]))
    return ordered.contiguous().view(-1).view(torch.uint8)
