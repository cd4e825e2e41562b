#!/usr/bin/env python3
"""Compare decoders of JPEGs on one GPU, each with our resize: torchvision's and, if it is installed, nvidia-nvimgcodec.

    python scripts/bench_decoders.py [--images 256] [--seconds 2] [--json FILE]

Prints one JSON object. `rates`: images/s from bytes in pinned memory to rows of 224x224 on the device, by threads,
batch and sizes of the pictures (500x375, or mixed), with the host's CPU time and the device memory that was taken.
`differences`: how far the rows of real photographs are from Pillow's, of 255. The one from PyPI needs
`pip install nvidia-nvimgcodec-cu13 nvidia-nvjpeg-cu13`; nothing else in nimble-jobs uses it.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.metadata
import io
import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from nimble_jobs.bench.environment import environment
from nimble_jobs.bench.scoring import photos
from nimble_jobs.engine import nvjpeg
from nimble_jobs.engine.pictures import PictureDecoder, available
from nimble_jobs.pictures import Pictures

SIZE = (224, 224)  # height, width
BATCHES = (32, 64, 128, 256)
THREADS = (1, 2, 4)
WARM_UP = 3  # batches a thread
Decode = Callable[[list[torch.Tensor]], list[torch.Tensor]]


class NvImageCodec:
    """nvidia-nvimgcodec's decoder in the place of torchvision's."""

    def __init__(self, *, fancy: bool = False) -> None:
        from nvidia import nvimgcodec

        self._codec = nvimgcodec
        options = f":fancy_upsampling={int(fancy)}"
        self._decoder = nvimgcodec.Decoder(device_id=torch.cuda.current_device(), options=options)
        self._params = nvimgcodec.DecodeParams(
            apply_exif_orientation=False,
            color_spec=nvimgcodec.ColorSpec.SRGB,
            sample_format=nvimgcodec.SampleFormat.P_RGB,
        )

    def __call__(self, encoded: list[torch.Tensor]) -> list[torch.Tensor]:
        streams = [self._codec.CodeStream(one.numpy()) for one in encoded]
        stream = torch.cuda.current_stream().cuda_stream
        images = self._decoder.decode(streams, params=self._params, cuda_stream=stream)
        if any(image is None for image in images):
            raise RuntimeError("nvimgcodec cannot decode it")
        return [torch.as_tensor(image, device="cuda").contiguous() for image in images]


def decoders(device: torch.device) -> dict[str, Callable[[], Decode]]:
    """What makes a decoder, by name."""
    found: dict[str, Callable[[], Decode]] = {"torchvision": lambda: nvjpeg.decoder(device, 3)}
    try:
        importlib.metadata.version("nvidia-nvimgcodec-cu13")
        NvImageCodec()
    except (importlib.metadata.PackageNotFoundError, ImportError, RuntimeError) as e:
        print(f"without nvimgcodec: {e}", file=sys.stderr)
        return found
    return found | {"nvimgcodec": NvImageCodec, "nvimgcodec-fancy": functools.partial(NvImageCodec, fancy=True)}


def pinned(encoded: Sequence[bytes]) -> Pictures:
    """A batch in pinned memory, where readers put it."""
    lengths = np.array([len(one) for one in encoded], dtype=np.int64)
    data = torch.frombuffer(bytearray(b"".join(encoded)), dtype=torch.uint8)
    data = data.pin_memory() if torch.cuda.is_available() else data
    sizes = [Image.open(io.BytesIO(one)).size[::-1] for one in encoded]
    return Pictures(
        data=data.numpy(),
        spans=np.stack([np.cumsum(lengths) - lengths, lengths], axis=1),
        sizes=np.array(sizes, dtype=np.int32),
        decoded=np.zeros(len(encoded), dtype=bool),
    )


def cut(encoded: Sequence[bytes], batch: int) -> list[Pictures]:
    """Batches of exactly this size; pictures repeat where there are too few."""
    whole = [encoded[i % len(encoded)] for i in range(-(-len(encoded) // batch) * batch)]
    return [pinned(whole[i : i + batch]) for i in range(0, len(whole), batch)]


def rate(
    batches: Sequence[Pictures],
    make: Callable[[], PictureDecoder],
    *,
    threads: int,
    seconds: float,
    failures: bool = False,
) -> dict[str, Any]:
    """Decode batches over and over in several threads, each with a decoder of its own, for about so many seconds."""
    start, stop = threading.Barrier(threads), threading.Event()
    spans: list[tuple[float, float, int, float]] = []
    errors: list[BaseException] = []

    def work(first: int) -> None:
        try:
            with closing(make()) as decoder:
                out = torch.empty(len(batches[0]), *SIZE, 3, dtype=torch.uint8, device=decoder.device)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                for i in range(WARM_UP):
                    decoder.decode(batches[(first + i) % len(batches)], out)
                start.wait()
                began, cpu, images, turn = time.perf_counter(), time.thread_time(), 0, first
                while not stop.is_set():
                    failed = decoder.decode(batches[turn % len(batches)], out)
                    if failed and not failures:
                        raise RuntimeError(f"not decoded: {dict(decoder.refusals)}")
                    images += len(batches[turn % len(batches)])
                    turn += 1
                    if time.perf_counter() - began > seconds:
                        break
                if decoder.done is not None:
                    decoder.done.synchronize()
                spans.append((began, time.perf_counter(), images, time.thread_time() - cpu))
        except BaseException as e:  # noqa: BLE001 - raised by the main thread
            errors.append(e)
            start.abort()
            stop.set()

    workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    images = sum(count for _, _, count, _ in spans)
    elapsed = max(end for _, end, _, _ in spans) - min(begin for begin, _, _, _ in spans)
    return {
        "images_per_s": round(images / elapsed),
        "cpu_us_per_image": round(1e6 * sum(cpu for *_, cpu in spans) / images, 1),
    }


def used_bytes() -> tuple[int, int]:
    """Device memory in use by everybody, and what of it torch has reserved."""
    free, total = torch.cuda.mem_get_info()
    return total - free, torch.cuda.memory_reserved()


def rates(device: torch.device, inputs: dict[str, list[bytes]], seconds: float) -> Iterable[dict[str, Any]]:
    """A row for each decoder, sizes, batch and number of threads."""
    for name, make in decoders(device).items():
        for sizes, encoded in inputs.items():
            for batch in BATCHES:
                batches = cut(encoded, batch)
                for threads in THREADS:
                    gc.collect()
                    torch.cuda.empty_cache()
                    all_before, torch_before = used_bytes()
                    row: dict[str, Any] = {"decoder": name, "sizes": sizes, "batch": batch, "threads": threads}
                    try:
                        row |= rate(
                            batches,
                            lambda make=make: PictureDecoder(device, *SIZE, 3, SIZE, decode=make()),
                            threads=threads,
                            seconds=seconds,
                        )
                        everybody, torchs = used_bytes()
                        row["torch_bytes"] = torchs - torch_before
                        row["other_bytes"] = everybody - all_before - row["torch_bytes"]
                    except RuntimeError as e:
                        row["error"] = str(e).partition("\n")[0]
                    print(json.dumps(row), file=sys.stderr, flush=True)
                    yield row


def differences(device: torch.device) -> Iterable[dict[str, Any]]:
    """How far resized rows, and unresized crops, are from Pillow's."""
    for name, make in decoders(device).items():
        for subsampling in ("4:2:0", "4:2:2", "4:4:4"):
            for resize, crop in ((SIZE, None), (None, SIZE)):
                encoded, expected = [], []
                for path in photos.sources():
                    image = Image.open(path).convert("RGB")
                    file = io.BytesIO()
                    image.save(file, "JPEG", quality=90, subsampling=subsampling)
                    encoded.append(file.getvalue())
                    seen = Image.open(file).convert("RGB")
                    left, top = (seen.width - SIZE[1]) // 2, (seen.height - SIZE[0]) // 2
                    box = (left, top, left + SIZE[1], top + SIZE[0])
                    seen = seen.resize(SIZE[::-1], Image.Resampling.BILINEAR) if resize else seen.crop(box)
                    expected.append(np.asarray(seen).astype(int))
                out = torch.empty(len(encoded), *SIZE, 3, dtype=torch.uint8, device=device)
                with closing(PictureDecoder(device, *SIZE, 3, resize, crop, decode=make())) as decoder:
                    failed = decoder.decode(pinned(encoded), out)
                    torch.cuda.synchronize(device)
                good = [i for i in range(len(encoded)) if i not in failed]
                far = np.abs(out.cpu().numpy().astype(int)[good] - np.stack(expected)[good])
                yield {
                    "decoder": name,
                    "subsampling": subsampling,
                    "resized": resize is not None,
                    "failed": len(failed),
                    "mean": round(float(far.mean()), 3),
                    "p99.9": float(np.percentile(far, 99.9)),
                    "most": int(far.max()),
                }


def inputs(count: int) -> dict[str, list[bytes]]:
    """JPEGs of one size, and of many."""
    rng = np.random.default_rng(0)
    sources = photos.sources()
    shapes = {
        "500x375": [(500, 375)] * count,
        "mixed": [(int(rng.integers(250, 751)), int(rng.integers(200, 551))) for _ in range(count)],
    }
    return {
        name: [
            photos.encoded(photos.Recipe(count=count, width=width, height=height), sources, i)
            for i, (width, height) in enumerate(sizes)
        ]
        for name, sizes in shapes.items()
    }


def write(found: dict[str, Any], device: torch.device, path: Path | None) -> None:
    """Print what was found and where, as one JSON object; also into a file if one is given."""
    where = environment(device)
    about = {name: where[name] for name in ("device", "driver", "versions", "commit", "date")}
    text = json.dumps({"environment": about, **found}, indent=1)
    print(text)
    if path is not None:
        path.write_text(text + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=256, help="JPEGs of each kind")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--json", type=Path, help="also write the object here")
    given = parser.parse_args()
    device = torch.device("cuda", 0)
    if (reason := available(device)) is not None:
        print(f"nothing to measure: {reason}", file=sys.stderr)
        return 1
    found = {
        "differences": list(differences(device)),
        "rates": list(rates(device, inputs(given.images), given.seconds)),
    }
    write(found, device, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
