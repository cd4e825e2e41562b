"""The benchmark's networks that torchvision builds, without pretrained weights and auxiliary classifiers.

Their papers: He et al. 2016, arXiv:1512.03385 (ResNet); Szegedy et al. 2015, arXiv:1409.4842 (GoogLeNet); Szegedy et
al. 2016, arXiv:1512.00567 (Inception-v3); Sandler et al. 2018, arXiv:1801.04381 (MobileNetV2); Tan and Le 2019,
arXiv:1905.11946 (EfficientNet).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from nimble_jobs.bench.zoo.starting import start
from nimble_jobs.models.torchvision_import import import_torchvision

# Their own initialisation takes seconds, and is replaced here anyway.
_AUXILIARY = {"aux_logits": False, "init_weights": False}
_ARGUMENTS: dict[str, dict[str, Any]] = {"googlenet": _AUXILIARY, "inception_v3": _AUXILIARY}


def classic(name: str, side: int, num_classes: int = 1000) -> nn.Module:
    """The torchvision model `name` with random weights, for images of `side` pixels; no normalisation of its input."""
    import_torchvision()
    from torchvision.models import get_model

    arguments = _ARGUMENTS.get(name, {})
    return start(get_model(name, weights=None, num_classes=num_classes, **arguments), side)
