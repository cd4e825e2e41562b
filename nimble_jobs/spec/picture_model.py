"""What a model says of how its pictures are prepared; and a transformers model's folder, of which only JSON is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nimble_jobs.errors import ModelError
from nimble_jobs.plural import by
from nimble_jobs.sentence import transformer_folder
from nimble_jobs.sentence.sources import read_mapping, typed
from nimble_jobs.spec.transform import TransformSpec

# Newer folders keep the settings of pictures in the second one, under `image_processor`.
_FILES = ("preprocessor_config.json", "processor_config.json")
_INTERPOLATIONS: dict[int, Literal["bilinear", "bicubic"]] = {2: "bilinear", 3: "bicubic"}  # numbers of Pillow
_LARGEST = 1 << 14  # pixels of a side; a larger one is a mistake
_HALF = (0.5, 0.5, 0.5)
_OF_CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


class OfModel(TransformSpec):
    """The transform that a model asks for. Encoded pictures take it; arrays stay as they are stored."""

    said_by: str  # a file, or the name of the model's weights
    problem: str | None = None  # why it is not understood

    @property
    def words(self) -> str:
        """For users, as `224 pixels on the shorter edge, bicubic, cropped to 224x224, mean 0.5, std 0.5`."""
        said = [] if self.shortest_edge is None else [f"{self.shortest_edge} pixels on the shorter edge"]
        said += [] if self.resize is None else [f"resized to {by(self.resize)}"]
        said += [] if self.interpolation is None else [self.interpolation]
        said += [] if self.center_crop is None else [f"cropped to {by(self.center_crop)}"]
        said += [] if self.scale is None else [f"scale {self.scale:.4g}"]
        for name in ("mean", "std"):
            values = getattr(self, name)
            said += [] if values is None else [f"{name} {spaced(values)}"]
        return ", ".join(said) or "unchanged"


def spaced(values: Sequence[float] | None) -> str:
    """Numbers for users, as `0.485 0.456 0.406`."""
    return " ".join(f"{value:.4g}" for value in values or ())


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """What a class of transformers does where its settings are silent."""

    size: dict[str, int]
    resample: int
    mean: tuple[float, ...] = _HALF
    std: tuple[float, ...] = _HALF
    crop: int | None = None  # side in pixels; None: it never crops
    edge: bool = False  # whether a size of one number is that of the shorter edge


_CLIP = _Kind(size={"shortest_edge": 224}, resample=3, mean=_OF_CLIP[0], std=_OF_CLIP[1], crop=224, edge=True)
_KINDS = {
    "CLIP": _CLIP,
    "Bit": _CLIP,
    "ViT": _Kind(size={"height": 224, "width": 224}, resample=2),
    "Siglip": _Kind(size={"height": 224, "width": 224}, resample=3),
    "DeiT": _Kind(size={"height": 256, "width": 256}, resample=3, crop=224),
}


def folder_transform(folder: Path) -> OfModel | None:
    """How the folder's pictures are prepared; None if it does not say. Its `problem` says what is not understood."""
    path = folder / _FILES[0]
    try:
        inner = transformer_folder(folder)
        path = next((inner / name for name in _FILES if (inner / name).exists()), inner / _FILES[0])
        if not path.exists():
            return None
        settings = read_mapping(path)
        if path.name == _FILES[1]:
            if "image_processor" not in settings:
                return None
            settings = typed(settings, "image_processor", dict, {}, path)
        return OfModel(said_by=str(path), **_steps(settings, path))
    except ModelError as e:
        return OfModel(said_by=str(path), problem=str(e))


def _steps(settings: dict[str, Any], path: Path) -> dict[str, Any]:
    """The fields of a transform. Raises ModelError."""
    name, kind = _kind(settings, path)
    if typed(settings, "do_pad", bool, False, path):
        raise ModelError(f"{path}: do_pad: found true, which nimble-jobs does not do")
    steps: dict[str, Any] = {}
    if typed(settings, "do_resize", bool, True, path):
        resample = typed(settings, "resample", int, kind.resample, path)
        if resample not in _INTERPOLATIONS:
            raise ModelError(f"{path}: resample: found {resample}; expected 2 (bilinear) or 3 (bicubic)")
        steps |= _size(settings, kind, path) | {"interpolation": _INTERPOLATIONS[resample]}
    if kind.crop is not None and typed(settings, "do_center_crop", bool, True, path):
        steps["center_crop"] = _crop(settings, kind.crop, path)
        of = steps.get("resize") or (steps.get("shortest_edge"),) * 2
        if None not in of and any(c > s for c, s in zip(steps["center_crop"], of, strict=True)):
            raise ModelError(f"{path}: crop_size: larger than size, so pictures would be padded")
    elif "shortest_edge" in steps:
        raise ModelError(f"{path}: size: {name} keeps the shape of a picture; expected do_center_crop, for one size")
    if not typed(settings, "do_rescale", bool, True, path):
        steps["scale"] = 1.0
    elif (factor := _numbers([settings.get("rescale_factor", 1 / 255)], "rescale_factor", path)[0]) != 1 / 255:
        steps["scale"] = factor
    if typed(settings, "do_normalize", bool, True, path):
        for ours, theirs, usual in (("mean", "image_mean", kind.mean), ("std", "image_std", kind.std)):
            given = settings.get(theirs)
            steps[ours] = _numbers(usual if given is None else given, theirs, path)
    return steps


def _kind(settings: dict[str, Any], path: Path) -> tuple[str, _Kind]:
    """The class that prepares pictures, by either of its names. Raises ModelError for one whose steps are not known."""
    name = settings.get("image_processor_type") or settings.get("feature_extractor_type")
    short = str(name).removesuffix("Fast").removesuffix("Pil")
    for end in ("ImageProcessor", "FeatureExtractor"):
        kind = _KINDS.get(short.removesuffix(end)) if short.endswith(end) else None
        if kind is not None:
            return str(name), kind
    known = ", ".join(f"{known}ImageProcessor" for known in _KINDS)
    raise ModelError(f"{path}: image_processor_type: found {name!r:.60}; nimble-jobs knows {known}")


def _size(settings: dict[str, Any], kind: _Kind, path: Path) -> dict[str, Any]:
    size = settings.get("size")
    if size is None:
        size = kind.size
    if type(size) is int:
        size = {"shortest_edge": size} if kind.edge else {"height": size, "width": size}
    if isinstance(size, dict):
        given = {name: value for name, value in size.items() if value is not None}
        if set(given) == {"shortest_edge"}:
            return {"shortest_edge": _side(given["shortest_edge"], "size", path)}
        if set(given) == {"height", "width"}:
            return {"resize": (_side(given["height"], "size", path), _side(given["width"], "size", path))}
    raise ModelError(f"{path}: size: found {size!r:.60}; expected shortest_edge, or height and width")


def _crop(settings: dict[str, Any], usual: int, path: Path) -> tuple[int, int]:
    crop = settings.get("crop_size")
    if crop is None:
        crop = usual
    height, width = (crop.get("height"), crop.get("width")) if isinstance(crop, dict) else (crop, crop)
    return _side(height, "crop_size", path), _side(width, "crop_size", path)


def _side(value: Any, name: str, path: Path) -> int:
    if type(value) is not int or not 1 <= value <= _LARGEST:
        raise ModelError(f"{path}: {name}: found {value!r:.60}; expected 1 to {_LARGEST} pixels")
    return value


def _numbers(values: Any, name: str, path: Path) -> tuple[float, ...]:
    """One number, or one for each channel. Raises ModelError, also for divisors that are not above 0."""
    listed = values if isinstance(values, list | tuple) else [values]
    fine = all(type(value) in (int, float) and math.isfinite(value) for value in listed)
    if not fine or len(listed) not in (1, 3) or (name != "image_mean" and min(listed) <= 0):
        kind = "numbers" if name == "image_mean" else "numbers above 0"
        raise ModelError(f"{path}: {name}: found {values!r:.60}; expected 1 or 3 {kind}")
    return tuple(map(float, listed))
