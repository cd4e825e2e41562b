"""NASNet-A for ImageNet.

Zoph, Vasudevan, Shlens, Le: Learning Transferable Architectures for Scalable Image Recognition. CVPR 2018,
arXiv:1707.07012. Cells: figure 4; sizes and costs: tables 2 and 3. A model is named N @ F: N normal cells a stage, F
filters before the classifier, which are 24 times the filters of the first stage.
"""

from __future__ import annotations

from torch import Tensor, nn

from nimble_jobs.bench.zoo.cells import Cell, CellSpec
from nimble_jobs.bench.zoo.starting import start

# State 0 is the output of the last cell but one, state 1 that of the last cell.
NORMAL = CellSpec(
    pairs=(
        (("sep_5x5", 1), ("sep_3x3", 0)),
        (("sep_5x5", 0), ("sep_3x3", 0)),
        (("avg_3x3", 1), ("none", 0)),
        (("avg_3x3", 0), ("avg_3x3", 0)),
        (("sep_3x3", 1), ("none", 1)),
    ),
    output=(0, 2, 3, 4, 5, 6),
)
REDUCTION = CellSpec(
    pairs=(
        (("sep_5x5", 1), ("sep_7x7", 0)),
        (("max_3x3", 1), ("sep_7x7", 0)),
        (("avg_3x3", 1), ("sep_5x5", 0)),
        (("none", 3), ("avg_3x3", 2)),
        (("sep_3x3", 2), ("max_3x3", 1)),
    ),
    output=(3, 4, 5, 6),
)


class NASNet(nn.Module):
    """A strided 3x3 convolution, two reductions as stem, and three stages of normal cells with a reduction between.

    The stem's cells have a quarter and a half of the `filters` of the first stage; every later reduction doubles them.
    With `skip_reductions` the cell after a reduction takes, beside the reduction, the cell before the reduction's
    input instead of that input. No auxiliary classifier, no dropped paths: inference needs neither.
    """

    def __init__(
        self,
        normal: CellSpec,
        reduction: CellSpec,
        *,
        repeats: int,
        filters: int,
        stem_filters: int,
        skip_reductions: bool,
        num_classes: int,
    ) -> None:
        super().__init__()
        self.skip_reductions = skip_reductions
        self.stem = nn.Sequential(nn.Conv2d(3, stem_filters, 3, stride=2, bias=False), nn.BatchNorm2d(stem_filters))
        self.cells = nn.ModuleList()
        before, last = stem_filters, stem_filters
        larger = False  # is the output of the last cell but one twice as high and wide as that of the last one?
        scaled = (filters // 4, filters // 2, filters, 2 * filters, 4 * filters)
        plan = [(reduction, scaled[0]), (reduction, scaled[1])]
        for stage in range(3):
            plan += [(reduction, scaled[2 + stage])] * (stage > 0) + [(normal, scaled[2 + stage])] * repeats
        for index, (spec, width) in enumerate(plan):
            halves = spec is reduction
            cell = Cell(spec, (before, last), width, reduction=halves, before_larger=larger, before_raw=index == 0)
            self.cells.append(cell)
            if not (skip_reductions and halves and index > 1):
                before = last
            last, larger = spec.filters_out(width), halves
        self.relu = nn.ReLU()
        self.classifier = nn.Linear(last, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        before = last = self.stem(x)
        for index, cell in enumerate(self.cells):
            result = cell(before, last)
            if not (self.skip_reductions and cell.reduction and index > 1):
                before = last
            last = result
        logits: Tensor = self.classifier(self.relu(last).mean((2, 3)))
        return logits


def nasnet_a_mobile(num_classes: int = 1000) -> nn.Module:
    """NASNet-A (4 @ 1056): 12 normal cells and 4 reductions, 44 filters in the first stage, input 3x224x224.

    5,289,978 parameters, 564 M multiply-adds; published: 5.3 M and 564 M.
    """
    network = NASNet(
        NORMAL,
        REDUCTION,
        repeats=4,
        filters=44,
        stem_filters=32,
        skip_reductions=False,
        num_classes=num_classes,
    )
    return start(network, 224)


def nasnet_a_large(num_classes: int = 1000) -> nn.Module:
    """NASNet-A (6 @ 4032): 18 normal cells and 4 reductions, 168 filters in the first stage, input 3x331x331.

    88,753,150 parameters, 23.8 G multiply-adds; published: 88.9 M and 23.8 G.
    """
    network = NASNet(
        NORMAL,
        REDUCTION,
        repeats=6,
        filters=168,
        stem_filters=96,
        skip_reductions=True,
        num_classes=num_classes,
    )
    return start(network, 331)
