"""What we do to Inductor's graph of operators: share equal products; run convolutions and long sums the fastest way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nimble_jobs.engine import fused_convolutions
from nimble_jobs.engine.inductor import graph_pass
from nimble_jobs.engine.measure import copies_at_once
from nimble_jobs.kernel_switches import Kernel, Without, listed
from nimble_jobs.kernels import ahead, epilogues, shared_products, split_k_pass

_DECIDING = (  # modules beside this one that decide what becomes of a graph
    "activations",
    "activations_triton",
    "bands",
    "dilated_triton",
    "epilogue_ways",
    "epilogues",
    "fx_nodes",
    "pointwise",
    "pointwise_pass",
    "pointwise_triton",
    "shared_products",
    "split_k",
    "split_k_pass",
    "split_k_shape",
    "split_k_triton",
)


def inductor_pass(device: torch.device, without: Without) -> Any:
    """`share_products`, `choose_ways` and `split_products` on a GPU, but for what is in `without`, as `compile_module`
    takes them.
    """

    def rewrite(graph: torch.fx.Graph) -> None:
        if Kernel.MERGED not in without:  # they are what makes products equal
            shared_products.share_products(graph)
        ahead.twice(lambda: choose(graph))

    def choose(graph: torch.fx.Graph) -> None:
        epilogues.choose_ways(graph, device, without=without)
        if Kernel.SPLIT_K not in without:
            split_k_pass.split_products(graph, device)

    def settings() -> str:
        return str((torch.cuda.get_device_name(device), listed(without), copies_at_once()))

    files = [Path(__file__).with_name(f"{name}.py") for name in _DECIDING]
    return graph_pass(rewrite, [*files, Path(fused_convolutions.__file__)], settings)
