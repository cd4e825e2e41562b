"""AmoebaNet-A for ImageNet, mobile size.

Real, Aggarwal, Huang, Le: Regularized Evolution for Image Classifier Architecture Search. AAAI 2019, arXiv:1802.01548.
Cells: figure 5; which inputs a cell passes on to its output, and the 1x7-7x1 convolution on a quarter of the filters,
are the authors' own (`amoeba_net_a` of their TPU models); sizes and costs: the table of mobile-size models.
"""

from __future__ import annotations

from torch import nn

from nimble_jobs.bench.zoo.cells import CellSpec
from nimble_jobs.bench.zoo.nasnet import NASNet
from nimble_jobs.bench.zoo.starting import start

# State 0 is the output of the last cell but one, state 1 that of the last cell.
NORMAL = CellSpec(
    pairs=(
        (("avg_3x3", 1), ("max_3x3", 1)),
        (("sep_3x3", 0), ("none", 0)),
        (("none", 1), ("avg_3x3", 0)),
        (("sep_3x3", 1), ("sep_5x5", 2)),
        (("avg_3x3", 5), ("sep_3x3", 1)),
    ),
    output=(0, 3, 4, 6),
)
REDUCTION = CellSpec(
    pairs=(
        (("sep_3x3", 0), ("avg_3x3", 1)),
        (("max_3x3", 1), ("sep_7x7", 2)),
        (("max_3x3", 0), ("max_3x3", 1)),
        (("sep_3x3", 4), ("1x7_7x1", 1)),
        (("avg_3x3", 0), ("sep_7x7", 1)),
    ),
    output=(2, 3, 4, 5, 6),
)


def amoebanet(num_classes: int = 1000) -> nn.Module:
    """AmoebaNet-A (N=4, F=50): 12 normal cells and 4 reductions stacked as in NASNet, 50 filters in the first stage.

    Input 3x224x224. 5,086,930 parameters, 555 M multiply-adds; published: 5.1 M and 555 M.
    """
    network = NASNet(
        NORMAL,
        REDUCTION,
        repeats=4,
        filters=50,
        stem_filters=32,
        skip_reductions=False,
        num_classes=num_classes,
    )
    return start(network, 224)
