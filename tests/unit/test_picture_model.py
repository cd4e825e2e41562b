"""How a model's folder says that its pictures are prepared, and that a job does as it says."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.models import get_model_weights

from nimble_jobs.data import open_reader
from nimble_jobs.decoding.picture import Undecodable, pixels
from nimble_jobs.decoding.recipe import MAX_PIXELS, Recipe, scaled
from nimble_jobs.errors import DataError
from nimble_jobs.models.pictures import left_out, with_model_transform
from nimble_jobs.spec import JobSpec, TransformSpec
from nimble_jobs.spec.model import FieldsSpec, InputSpec
from nimble_jobs.spec.picture_model import OfModel, folder_transform
from nimble_jobs.workloads.decode import on_host
from tests.photographs import photographs
from tests.picture_jobs import spec_of

CLIP = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 24},
    "crop_size": {"height": 16, "width": 20},
    "resample": 3,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.2, 0.3, 0.4],
    "rescale_factor": 1 / 255,
}


def said(folder: Path, name: str = "preprocessor_config.json", **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(settings))
    return folder


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    """Smooth, as photographs are."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("size", [(48, 37), (31, 90), (24, 24), (17, 60)])
@pytest.mark.parametrize("kind", ["CLIP", "ViT", "Siglip", "DeiT", "Bit"])
def test_pictures_are_prepared_as_transformers_does(tmp_path: Path, kind: str, size: tuple[int, int]) -> None:
    """With equal pixels if bicubic, else to one of 255, before mean and standard deviation."""
    transformers = pytest.importorskip("transformers")
    name = f"{kind}ImageProcessorPil"
    own: dict[str, Any] = {"size": {"shortest_edge": 24}, "crop_size": {"height": 16, "width": 20}}
    if kind in ("ViT", "Siglip", "DeiT"):
        own = {"size": {"height": 24, "width": 28}} | (
            {"crop_size": {"height": 16, "width": 20}} if kind == "DeiT" else {}
        )
    processor = getattr(transformers, name)(**own)
    processor.save_pretrained(tmp_path / "model")
    picture(*size).save(tmp_path / "a.png")
    expected = processor(images=Image.open(tmp_path / "a.png"), return_tensors="np")["pixel_values"]
    found = folder_transform(tmp_path / "model")
    assert found is not None
    assert found.problem is None
    spec = InputSpec(source=str(tmp_path / "a.png"), format="images", transform=found)
    with open_reader(spec) as reader:
        x = reader.take(np.array([0])).x
        assert reader.notes() == [
            f"pictures are prepared as {tmp_path}/model/preprocessor_config.json says: {found.words}"
        ]
    assert x.shape == expected.shape
    steps = 1.01 / 255 if found.interpolation == "bilinear" else 1e-6
    np.testing.assert_allclose(x, expected, atol=steps / min(found.std or (1.0,)), rtol=0)


def test_what_is_read(tmp_path: Path) -> None:
    """Every setting, also under the names of older folders, and what is usual where the folder is silent."""
    found = folder_transform(said(tmp_path / "a", **CLIP))
    assert found is not None
    assert found.model_dump(exclude={"said_by"}, exclude_none=True) == {
        "shortest_edge": 24,
        "interpolation": "bicubic",
        "center_crop": (16, 20),
        "mean": (0.5, 0.4, 0.3),
        "std": (0.2, 0.3, 0.4),
    }
    assert found.words == (
        "24 pixels on the shorter edge, bicubic, cropped to 16x20, mean 0.5 0.4 0.3, std 0.2 0.3 0.4"
    )
    old = folder_transform(said(tmp_path / "b", feature_extractor_type="CLIPFeatureExtractor", size=30, crop_size=20))
    assert old is not None
    assert (old.shortest_edge, old.center_crop, old.interpolation) == (30, (20, 20), "bicubic")
    assert old.mean == (0.48145466, 0.4578275, 0.40821073)
    vit = folder_transform(
        said(tmp_path / "c", image_processor_type="ViTImageProcessorFast", size=8, do_rescale=False, do_normalize=False)
    )
    assert vit is not None
    assert vit.model_dump(exclude={"said_by"}, exclude_none=True) == {
        "resize": (8, 8),
        "interpolation": "bilinear",
        "scale": 1.0,
    }
    new = folder_transform(said(tmp_path / "d", "processor_config.json", image_processor=CLIP))
    assert new is not None
    assert (new.shortest_edge, Path(new.said_by).name) == (24, "processor_config.json")
    assert folder_transform(said(tmp_path / "e", "processor_config.json", tokenizer={})) is None
    assert folder_transform(tmp_path) is None


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (
            {"image_processor_type": "DonutImageProcessor"},
            "image_processor_type: found 'DonutImageProcessor'; nimble-jobs knows",
        ),
        ({"image_processor_type": None}, "image_processor_type: found None"),
        ({"resample": 1}, r"resample: found 1; expected 2 \(bilinear\) or 3 \(bicubic\)"),
        ({"resample": "3"}, "resample: found '3'; expected a whole number"),
        ({"do_pad": True}, "do_pad: found true"),
        ({"size": {"longest_edge": 9}}, "size: found .* expected shortest_edge, or height and width"),
        ({"size": {"shortest_edge": 0}}, "size: found 0; expected 1 to 16384 pixels"),
        ({"crop_size": {"height": 30, "width": 16}}, "crop_size: larger than size, so pictures would be padded"),
        ({"do_center_crop": False}, "size: CLIPImageProcessor keeps the shape of a picture; expected do_center_crop"),
        ({"image_mean": [0.5, 0.5]}, "image_mean: found .* expected 1 or 3 numbers"),
        ({"image_std": [0.5, 0.5, 0]}, "image_std: found .* expected 1 or 3 numbers above 0"),
        ({"rescale_factor": -1}, "rescale_factor: found .* expected 1 or 3 numbers above 0"),
    ],
)
def test_what_is_not_understood_is_said(tmp_path: Path, changed: dict[str, Any], problem: str) -> None:
    """With the file and the setting, and only if there are pictures to prepare."""
    found = folder_transform(said(tmp_path / "model", **{**CLIP, **changed}))
    assert found is not None
    (tmp_path / "p").mkdir()
    picture(20, 20).save(tmp_path / "p/a.png")
    spec = InputSpec(source=str(tmp_path / "p"), format="images", transform=found)
    with pytest.raises(DataError, match=rf"^{tmp_path}/model/preprocessor_config.json: {problem}.*in the spec$"):
        open_reader(spec)
    np.save(tmp_path / "x.npy", np.zeros((2, 3), dtype=np.float32))
    with open_reader(InputSpec(source=str(tmp_path / "x.npy"), format="npy", transform=found)) as reader:
        assert reader.signature.shape == (3,)


def test_a_broken_file_is_said(tmp_path: Path) -> None:
    """It is not taken for a folder that says nothing."""
    (tmp_path / "preprocessor_config.json").write_text("{")
    found = folder_transform(tmp_path)
    assert found is not None
    assert found.problem is not None
    assert "not JSON" in found.problem


def test_the_spec_wins(tmp_path: Path) -> None:
    """A transform of the spec is taken whole; other sources of models have no folder."""
    said(tmp_path / "model", **CLIP)
    folder = spec_of(tmp_path, input={}, output={"path": "out"}, model={"source": f"transformers:{tmp_path}/model"})
    assert isinstance(with_model_transform(folder).input.transform, OfModel)
    own = TransformSpec(resize=(8, 8))
    given = folder.model_copy(update={"input": folder.input.model_copy(update={"transform": own})})
    assert with_model_transform(given).input.transform is own
    other = spec_of(tmp_path, input={}, output={"path": "out"})
    assert with_model_transform(other) is other


def of_weights(tmp_path: Path, name: str, weights: str) -> JobSpec:
    asked = spec_of(
        tmp_path, input={}, output={"path": "out"}, model={"source": f"torchvision:{name}", "weights": weights}
    )
    return with_model_transform(asked)


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("resnet50", "DEFAULT"),
        ("resnet50", "IMAGENET1K_V1"),
        ("efficientnet_b1", "IMAGENET1K_V1"),
        ("efficientnet_v2_l", "DEFAULT"),
        ("vgg16", "IMAGENET1K_FEATURES"),
    ],
)
def test_named_weights_of_torchvision_say_how(name: str, weights: str, tmp_path: Path) -> None:
    """As torchvision prepares pictures for them, up to 1 of 255. It rounds the place of a crop to an even number, so
    for some widths it lies one pixel further than ours; these have other widths.
    """
    asked = of_weights(tmp_path, name, weights)
    steps: Any = get_model_weights(name)[weights].transforms()
    edge, side = steps.resize_size[0], steps.crop_size[0]
    width = next(width for width in range(560, 600) if (edge * width // 390 - side) % 4 != 3)
    images = [photographs()[key].crop((0, 0, width, 390)) for key in ("china", "coffee")]
    for i, image in enumerate(images):
        image.save(tmp_path / f"{i}.png")
    with open_reader(asked.input) as reader:
        [batch] = reader.batches(batch_size=2)
        [note] = reader.notes()
    assert note.startswith(f"pictures are prepared as {get_model_weights(name)[weights]} says: {edge} pixels on")
    expected = torch.stack([steps(image) for image in images]).numpy()
    far = np.abs(batch.x - expected) * np.array(steps.std, np.float32)[:, None, None] * 255
    assert far.max() <= 1.01


def test_a_transform_without_what_the_weights_expect_is_noticed(tmp_path: Path) -> None:
    """Not if it has either, nor if nothing is known about the weights."""
    asked = of_weights(tmp_path, "resnet50", "IMAGENET1K_V1")
    assert left_out(asked) is None
    for transform, weights, told in (
        (TransformSpec(resize=(224, 224)), "IMAGENET1K_V1", True),
        (TransformSpec(resize=(224, 224), mean=(0.5,)), "IMAGENET1K_V1", False),
        (TransformSpec(resize=(224, 224)), "a.pt", False),
    ):
        own = asked.model_copy(
            update={
                "input": asked.input.model_copy(update={"transform": transform}),
                "model": asked.model.model_copy(update={"weights": weights}),
            }
        )
        assert with_model_transform(own) is own
        assert (left_out(own) is not None) == told
        assert not told or "ResNet50_Weights.IMAGENET1K_V1 expects pixels normalised with mean 0.485" in str(
            left_out(own)
        )


def test_what_weights_do_not_say_stays_open(tmp_path: Path) -> None:
    """Random weights, files, other kinds of models, and names that the build of the model refuses."""
    for name, weights in (
        ("fcn_resnet50", "DEFAULT"),
        ("resnet50", "NONE"),
        ("nothing", "DEFAULT"),
        ("resnet50", "a.pt"),
    ):
        assert of_weights(tmp_path, name, weights).input.transform == TransformSpec()


def test_arrays_do_not_take_it(tmp_path: Path) -> None:
    """They are as they were without it: somebody has prepared them, who knows how."""
    found = folder_transform(said(tmp_path / "model", **CLIP))
    pixels = np.random.default_rng(0).integers(0, 256, (2, 30, 30, 3), dtype=np.uint8)
    np.savez(tmp_path / "x.npz", images=pixels, age=np.ones(2, dtype=np.float32))
    for fields in (FieldsSpec(x="images"), FieldsSpec(x={"pixel_values": "images", "age": "age"})):
        plain = InputSpec(source=str(tmp_path / "x.npz"), format="npz", fields=fields)
        of_model = plain.model_copy(update={"transform": found})
        with open_reader(plain) as one, open_reader(of_model) as other:
            assert one.signature == other.signature
            np.testing.assert_array_equal(one.take(np.array([0, 1])).x, other.take(np.array([0, 1])).x)
    numbers = {"fields": FieldsSpec(x={"age": "age"})}
    own = plain.model_copy(update={**numbers, "transform": TransformSpec(resize=(8, 8))})
    with pytest.raises(DataError, match="none of the inputs is an image"):
        open_reader(own)
    with open_reader(of_model.model_copy(update=numbers)) as reader:
        assert reader.packing is not None


def test_stored_arrays_by_their_shorter_edge(tmp_path: Path) -> None:
    """All have one shape, so it is a resize to one size. Bicubic is for encoded pictures."""
    pixels = np.random.default_rng(0).integers(0, 256, (2, 30, 45, 3), dtype=np.uint8)
    np.save(tmp_path / "x.npy", pixels)
    by_edge = TransformSpec(shortest_edge=20, center_crop=(16, 16))
    by_size = TransformSpec(resize=(20, 30), center_crop=(16, 16))
    both = [
        open_reader(InputSpec(source=str(tmp_path / "x.npy"), format="npy", transform=transform))
        .take(np.array([0, 1]))
        .x
        for transform in (by_edge, by_size)
    ]
    np.testing.assert_array_equal(*both)
    bicubic = by_edge.model_copy(update={"interpolation": "bicubic"})
    with pytest.raises(DataError, match="interpolation: found bicubic; expected bilinear for stored arrays"):
        open_reader(InputSpec(source=str(tmp_path / "x.npy"), format="npy", transform=bicubic))


def test_what_fits_is_left_to_a_device() -> None:
    """By the shorter edge: small pictures are enlarged, and what would grow beyond all memory is left to the host."""
    edge = Recipe(channels=3, resize=None, center_crop=(8, 8), size=(8, 8), shortest_edge=8)
    assert edge.fits(2, 3)
    assert not edge.fits(1, MAX_PIXELS // 60)
    assert not edge.fits(10_000, 10_000)
    crop = Recipe(channels=3, resize=None, center_crop=(8, 9), size=(8, 9))
    assert [crop.fits(8, 9), crop.fits(8, 8)] == [True, False]
    same = Recipe(channels=3, resize=None, center_crop=None, size=(8, 9))
    assert [same.fits(8, 9), same.fits(9, 8)] == [True, False]
    assert on_host("bicubic").resize == "bicubic with antialiasing"


def test_a_sliver_does_not_become_a_giant() -> None:
    """A picture of one pixel's width would grow beyond all memory."""
    assert scaled(224, 3, 2000) == (224, 149_333)
    file = BytesIO()
    Image.new("RGB", (2, 30_000)).save(file, "PNG")
    recipe = Recipe(channels=3, resize=None, center_crop=(224, 224), size=(224, 224), shortest_edge=224)
    assert MAX_PIXELS < 224 * 3_360_000
    with pytest.raises(Undecodable, match="image becomes 3360000x224 pixels; expected at most"):
        pixels(file, recipe)
