"""How far predictions agree between pictures decoded on the CPU and on the GPU, on 1,000 photographs.

    python scripts/compare_decoders.py [--device cuda] [--count 1000] [--photos DIR] [--table FILE]

The photographs are crops of those that scikit-image and scikit-learn ship, or of those in DIR, of several sizes and
qualities. Random weights would say nothing of agreement, so a small network first learns, from other crops, which
photograph a crop comes from. On a CPU torchvision's decoder stands in for the GPU's. Needs no network. The table is
added to FILE.
"""

from __future__ import annotations

import argparse
import platform
from contextlib import closing
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from measure_decoding import batch_of
from measuring import commit
from PIL import Image
from torch import nn

from nimble_jobs.bench.scoring.photos import sources
from nimble_jobs.decoding.picture import decoder, pixels
from nimble_jobs.decoding.recipe import Recipe
from nimble_jobs.engine.picture_trial import available
from nimble_jobs.engine.pictures import PictureDecoder, decoder_name

SIDE, BATCH = 128, 50
RECIPE = Recipe(channels=3, resize=(SIDE, SIDE), center_crop=None, size=(SIDE, SIDE))
STEPS = 900


def photographs(folder: Path | None) -> list[Image.Image]:
    """Those of a folder, else those that both libraries ship within their packages."""
    return [Image.open(path).convert("RGB") for path in sources(folder)]


def crops(found: list[Image.Image], count: int, seed: int) -> tuple[list[bytes], torch.Tensor]:
    """JPEGs, and the number of the photograph that each comes from."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, len(found), size=count)
    encoded = []
    for label in labels.tolist():
        image = found[label]
        side = int(rng.integers(min(image.size) // 3, min(image.size)))
        left, top = (int(rng.integers(0, n - side + 1)) for n in image.size)
        sides = rng.integers(150, 700, size=2).tolist()
        part = image.crop((left, top, left + side, top + side)).resize(sides, Image.Resampling.LANCZOS)
        sink = BytesIO()
        subsampling = int(rng.choice([0, 1, 2]))
        part.save(sink, "JPEG", quality=int(rng.choice([50, 75, 90, 95])), subsampling=subsampling)
        encoded.append(sink.getvalue())
    return encoded, torch.from_numpy(labels)


def by_cpu(encoded: list[bytes]) -> torch.Tensor:
    """uint8 [n, SIDE, SIDE, 3]."""
    return torch.from_numpy(np.stack([pixels(BytesIO(one), RECIPE) for one in encoded]))


def by_device(encoded: list[bytes], device: torch.device) -> tuple[torch.Tensor, int]:
    """The same, decoded by the device, and how many of them it did not decode."""
    rows, refused = [], 0
    with closing(PictureDecoder(device, RECIPE)) as made:
        for first in range(0, len(encoded), BATCH):
            some = encoded[first : first + BATCH]
            out = torch.zeros(len(some), SIDE, SIDE, 3, dtype=torch.uint8, device=device)
            failed = made.decode(batch_of(some, RECIPE), out)
            if made.done is not None:
                made.done.synchronize()
            refused += len(failed)
            rows.append(out.cpu())
    return torch.cat(rows), refused


def network(classes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64), (64, 96)):
        layers += [nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, classes))


def values(x: torch.Tensor) -> torch.Tensor:
    return x.permute(0, 3, 1, 2).float() / 127.5 - 1


def trained(found: list[Image.Image]) -> nn.Module:
    """A network that has learnt from 600 crops, decoded on the CPU."""
    torch.manual_seed(0)
    encoded, labels = crops(found, 600, seed=1)
    x, net = by_cpu(encoded), network(len(found))
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    for _ in range(STEPS):
        rows = torch.randint(0, len(x), (32,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(values(x[rows])), labels[rows]).backward()
        optimizer.step()
    return net.eval()


@torch.no_grad()
def probabilities(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([net(values(part)).softmax(dim=1) for part in x.split(BATCH)])


def report(photos: list[Image.Image], count: int, device: torch.device) -> str:
    encoded, labels = crops(photos, count, seed=0)
    net = trained(photos)
    host = by_cpu(encoded)
    other, refused = by_device(encoded, device)
    far = (host.to(torch.int16) - other.to(torch.int16)).abs()
    p, q = probabilities(net, host), probabilities(net, other)
    right = (p.argmax(1) == labels).float().mean().item()
    same = (p.argmax(1) == q.argmax(1)).float().mean().item()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} as a stand-in"
    rows = [
        ("photographs, decoded by the device", f"{count}, {count - refused}"),
        ("right on the CPU's pixels", f"{right:.1%}"),
        ("same top-1", f"{same:.2%}"),
        ("largest difference of a probability", f"{(p - q).abs().max().item():.4f}"),
        ("mean difference of a pixel, of 255", f"{far.float().mean().item():.3f}"),
        ("largest difference of a pixel", f"{far.max().item()}"),
        *((f"pixels that differ by {low} to {high}", f"{share(far, low, high):.3%}") for low, high in SPANS),
    ]
    lines = [f"| | {name} |", "|---|---|", *(f"| {what} | {found} |" for what, found in rows)]
    made = f"{decoder()}; {decoder_name() if device.type == 'cuda' else 'torchvision on the CPU'}"
    return "\n".join([*lines, "", f"Commit {commit() or 'unknown'}, torch {torch.__version__}, {made}."])


SPANS = ((0, 0), (1, 1), (2, 3), (4, 7), (8, 15), (16, 31), (32, 255))


def share(far: torch.Tensor, low: int, high: int) -> float:
    return ((far >= low) & (far <= high)).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--photos", type=Path, help="a folder of photographs; default: those of the two libraries")
    parser.add_argument("--table", type=Path, help="add what was found to this file")
    given = parser.parse_args()
    device = torch.device(given.device)
    if device.type == "cuda" and (why := available(device)) is not None:
        raise SystemExit(f"{device}: {why}")
    found = report(photographs(given.photos), given.count, device)
    print(found)
    if given.table is not None:
        before = given.table.read_text() if given.table.exists() else ""
        given.table.write_text(f"{before}\n{found}\n")


if __name__ == "__main__":
    main()
