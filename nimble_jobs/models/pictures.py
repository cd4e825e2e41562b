"""How a model wants its pictures prepared, if its spec does not say: as its folder or its named weights say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nimble_jobs.models.source import source_of, weights_entry
from nimble_jobs.models.torchvision_import import import_torchvision
from nimble_jobs.spec.model import JobSpec, ModelSpec
from nimble_jobs.spec.picture_model import OfModel, folder_transform, spaced
from nimble_jobs.spec.transform import TransformSpec


def with_model_transform(spec: JobSpec) -> JobSpec:
    """The spec, with the transform of its model if it has none of its own and the model says one.

    What a folder says and is not understood is kept as a problem, which matters only if the input has encoded pictures.
    Raises ModelError if `model.source` is incomplete.
    """
    if spec.input.transform != TransformSpec():
        return spec
    source = source_of(spec.model)
    found: OfModel | None = None
    if source.scheme == "transformers":
        found = folder_transform(Path(source.target))
    elif source.scheme == "torchvision":
        found = _of_weights(spec.model, source.target)
    if found is None:
        return spec
    return spec.model_copy(update={"input": spec.input.model_copy(update={"transform": found})})


def left_out(spec: JobSpec) -> str | None:
    """What the spec's own transform does not do, although the model's named weights were evaluated with it."""
    transform, source = spec.input.transform, source_of(spec.model)
    if source.scheme != "torchvision" or transform.mean is not None or transform.std is not None:
        return None
    found = _of_weights(spec.model, source.target)
    if found is None:
        return None
    return (
        f"{found.said_by} expects pixels normalised with mean {spaced(found.mean)} and std {spaced(found.std)}, but "
        "input.transform sets neither; add them, or remove input.transform"
    )


def _of_weights(spec: ModelSpec, name: str) -> OfModel | None:
    """What torchvision's weights were evaluated with; None if they are a file or random, or not of a classifier."""
    entry = weights_entry(spec)
    if entry is None:
        return None
    import_torchvision()
    from torchvision.models import get_model_weights

    try:
        weights: Any = get_model_weights(name)[entry]
    except (KeyError, ValueError):
        return None  # an unknown name, of which the build of the model says more
    steps = weights.transforms()
    if type(steps).__name__ != "ImageClassification":  # others are for videos, or for pictures with boxes or masks
        return None
    return OfModel(
        said_by=str(weights),
        shortest_edge=steps.resize_size[0],
        interpolation=steps.interpolation.value,
        center_crop=(steps.crop_size[0], steps.crop_size[0]),
        mean=tuple(steps.mean),
        std=tuple(steps.std),
    )
