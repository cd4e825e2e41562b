"""The benchmark's networks that torchvision and timm build, without pretrained weights and auxiliary classifiers.

Their papers: He et al. 2016, arXiv:1512.03385 (ResNet); Szegedy et al. 2015, arXiv:1409.4842 (GoogLeNet); Szegedy et
al. 2016, arXiv:1512.00567 (Inception-v3); Sandler et al. 2018, arXiv:1801.04381 (MobileNetV2); Tan and Le 2019,
arXiv:1905.11946 (EfficientNet); Huang et al. 2017, arXiv:1608.06993 (DenseNet); Ma et al. 2018, arXiv:1807.11164
(ShuffleNetV2); Iandola et al. 2016, arXiv:1602.07360 (SqueezeNet); Chen et al. 2017, arXiv:1706.05587 (DeepLabv3). By
timm: Sun et al. 2019, arXiv:1902.09212 (HRNet); Liu et al. 2018, arXiv:1712.00559 (PNASNet); Xu et al. 2021,
arXiv:2104.06399 (CoaT); Tan and Le 2019, arXiv:1907.09595 (MixNet); Szegedy et al. 2017, arXiv:1602.07261
(Inception-v4); Dosovitskiy et al. 2021, arXiv:2010.11929 (ViT).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from nimble_jobs.bench.zoo.starting import start
from nimble_jobs.models import from_timm
from nimble_jobs.models.torchvision_import import import_torchvision

# The own initialisation of these two takes seconds, and is replaced here anyway.
_AUXILIARY = {"aux_logits": False, "init_weights": False}
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "googlenet": _AUXILIARY,
    "inception_v3": _AUXILIARY,
    "deeplabv3_resnet50": {"num_classes": 21, "weights_backbone": None},
}


def classic(name: str, side: int, num_classes: int = 1000) -> nn.Module:
    """The torchvision model `name` with random weights, for images of `side` pixels; no normalisation of its input."""
    import_torchvision()
    from torchvision.models import get_model

    arguments = {"num_classes": num_classes, **_ARGUMENTS.get(name, {})}
    return start(get_model(name, weights=None, **arguments), side)


def of_timm(name: str, side: int) -> nn.Module:
    """The timm model `name` with random weights, for images of `side` pixels. Raises ModelError without timm."""
    return start(from_timm.build(name, {}), side)
