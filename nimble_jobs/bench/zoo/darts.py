"""DARTS for ImageNet, with the cells of the second-order search.

Liu, Simonyan, Yang: DARTS: Differentiable Architecture Search. ICLR 2019, arXiv:1806.09055. Cells: figures 4 and 5,
published by the authors as `DARTS_V2`; sizes and costs: section 3.3 and table 3.
"""

from __future__ import annotations

from torch import Tensor, nn

from nimble_jobs.bench.zoo.cells import Cell, CellSpec
from nimble_jobs.bench.zoo.starting import start

# State 0 is the output of the last cell but one, state 1 that of the last cell.
NORMAL = CellSpec(
    pairs=(
        (("sep_3x3", 0), ("sep_3x3", 1)),
        (("sep_3x3", 0), ("sep_3x3", 1)),
        (("sep_3x3", 1), ("none", 0)),
        (("none", 0), ("dil_3x3", 2)),
    ),
    output=(2, 3, 4, 5),
)
REDUCTION = CellSpec(
    pairs=(
        (("max_3x3", 0), ("max_3x3", 1)),
        (("none", 2), ("max_3x3", 1)),
        (("max_3x3", 0), ("none", 2)),
        (("none", 2), ("max_3x3", 1)),
    ),
    output=(2, 3, 4, 5),
)


class DARTS(nn.Module):
    """Three strided 3x3 convolutions as stem, then `layers` cells; those at a third and two thirds are reductions."""

    def __init__(self, *, filters: int, layers: int, num_classes: int) -> None:
        super().__init__()
        self.stem0 = nn.Sequential(
            nn.Conv2d(3, filters // 2, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(filters // 2),
            nn.ReLU(),
            nn.Conv2d(filters // 2, filters, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(filters),
        )
        self.stem1 = nn.Sequential(
            nn.ReLU(),
            nn.Conv2d(filters, filters, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(filters),
        )
        self.cells = nn.ModuleList()
        before, last, width = filters, filters, filters
        larger = True  # is the output of the last cell but one twice as high and wide as that of the last one?
        for index in range(layers):
            halves = index in (layers // 3, 2 * layers // 3)
            width *= 2 if halves else 1
            spec = REDUCTION if halves else NORMAL
            self.cells.append(Cell(spec, (before, last), width, reduction=halves, before_larger=larger))
            before, last, larger = last, spec.filters_out(width), halves
        self.classifier = nn.Linear(last, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        before = self.stem0(x)
        last = self.stem1(before)
        for cell in self.cells:
            before, last = last, cell(before, last)
        logits: Tensor = self.classifier(last.mean((2, 3)))
        return logits


def darts(num_classes: int = 1000) -> nn.Module:
    """DARTS (second order): 14 cells of which 2 reductions, 48 filters at first, input 3x224x224.

    4,718,752 parameters, 530 M multiply-adds in convolutions and the classifier; published: 4.7 M and 574 M
    (which counts more than those).
    """
    return start(DARTS(filters=48, layers=14, num_classes=num_classes), 224)
