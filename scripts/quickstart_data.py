"""Writes the quick start's data to jobs/data, once: scans of digits and photographs that Python packages ship."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np

DATA = Path(__file__).resolve().parents[1] / "jobs" / "data"
HELD_OUT = 360  # of 1,797
PHOTOS = {
    "sklearn": ("datasets/images/china.jpg", "datasets/images/flower.jpg"),
    "skimage": tuple(
        f"data/{name}"
        for name in [
            "astronaut.png",
            "brick.png",
            "camera.png",
            "chelsea.png",
            "coffee.png",
            "coins.png",
            "grass.png",
            "gravel.png",
            "hubble_deep_field.jpg",
            "moon.png",
            "motorcycle_left.png",
            "motorcycle_right.png",
            "retina.jpg",
            "rocket.jpg",
        ]
    ),
}


def digits(data: Path = DATA) -> None:
    """Split scikit-learn's 1,797 scans, 8x8 with values from 0 to 16, into 1,437 for training and 360 held out."""
    train, held_out = data / "digits-train.npz", data / "digits-held-out.npz"
    if train.exists() and held_out.exists():
        return
    from sklearn.datasets import load_digits  # slow to load, and seldom needed

    bunch = load_digits()
    images, labels = bunch.images.astype(np.uint8), bunch.target.astype(np.int64)
    ids = np.array([f"digit-{i:04d}" for i in range(len(labels))])
    order = np.random.default_rng(0).permutation(len(labels))
    for path, rows in ((held_out, order[:HELD_OUT]), (train, order[HELD_OUT:])):
        temporary = path.with_suffix(".tmp.npz")
        np.savez(temporary, images=images[rows], labels=labels[rows], ids=ids[rows])
        temporary.replace(path)
        print(f"{path.name}: {len(rows)} scans")


def photos(data: Path = DATA) -> None:
    """Copy the photographs that scikit-learn and scikit-image ship."""
    folder = data / "photos"
    folder.mkdir(exist_ok=True)
    copied = 0
    for package, names in PHOTOS.items():
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            raise SystemExit(f"{package} is not installed; run scripts/setup quickstart")
        for name in names:
            source, target = Path(spec.origin).parent / name, folder / Path(name).name
            if not target.exists():
                shutil.copyfile(source, target)
                copied += 1
    if copied:
        print(f"{folder.name}: {copied} photographs")


if __name__ == "__main__":
    DATA.mkdir(parents=True, exist_ok=True)
    digits()
    photos()
