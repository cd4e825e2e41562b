#!/usr/bin/env python3
"""Measure how fast the GPU turns JPEGs into rows of 224x224: decoded, resized by our kernel, nothing else.

    python scripts/bench_decoders.py [FOLDER] [--images 256] [--batch 32 64] [--threads 1 2] [--seconds 2] [--json FILE]

The JPEGs are those of FOLDER, else some of 500x375 and of mixed sizes are made. They lie in pinned memory, so neither
the disk nor the readers are measured. Decoders are the one that jobs use and, if it is installed, nvidia-nvimgcodec
(`pip install nvidia-nvimgcodec-cu13 nvidia-nvjpeg-cu13`; nothing else in nimble-jobs uses it).

Prints one JSON object. `rates`: images/s by decoder, pictures, batch and threads, with the host's CPU time, the device
memory that was taken and, for FOLDER, why pictures were refused. `available_s` is what a job pays once before its first
batch: nvJPEG, our kernel and a test picture.
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
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import environment, save
from PIL import Image

from nimble_jobs.bench.scoring import photos
from nimble_jobs.decoding.recipe import Recipe
from nimble_jobs.engine.device import describe, facts
from nimble_jobs.engine.picture_trial import available
from nimble_jobs.engine.pictures import PictureDecoder, decoder_name
from nimble_jobs.pictures import Pictures

SIZE = (224, 224)  # height, width
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


def decoders() -> dict[str, Callable[[], Decode | None]]:
    """What makes a decoder, by name; None stands for the one that jobs use."""
    found: dict[str, Callable[[], Decode | None]] = {"nimble-jobs": lambda: None}
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
        alike=np.full(len(encoded), -1),
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


def decoder(device: torch.device, make: Callable[[], Decode | None], refusals: Counter[str]) -> PictureDecoder:
    """One that counts in `refusals` what it does not take."""
    made = PictureDecoder(device, Recipe(channels=3, size=SIZE, resize=SIZE), decode=make())
    made.refusals = refusals
    return made


def rates(device: torch.device, inputs: dict[str, list[bytes]], given: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """A row for each decoder, kind of picture, batch and number of threads."""
    for (name, make), (kind, encoded) in product(decoders().items(), inputs.items()):
        for batch in given.batch:
            batches = cut(encoded, batch)
            for threads in given.threads:
                gc.collect()
                torch.cuda.empty_cache()
                all_before, torch_before = used_bytes()
                refusals: Counter[str] = Counter()
                ready = functools.partial(decoder, device, make, refusals)
                row: dict[str, Any] = {"decoder": name, "pictures": kind, "batch": batch, "threads": threads}
                try:
                    row |= rate(batches, ready, threads=threads, seconds=given.seconds, failures=bool(given.folder))
                    everybody, torchs = used_bytes()
                    row["torch_bytes"] = torchs - torch_before
                    row["other_bytes"] = everybody - all_before - row["torch_bytes"]
                    row["refused"] = dict(refusals)
                except RuntimeError as e:
                    row["error"] = str(e).partition("\n")[0]
                print(json.dumps(row), file=sys.stderr, flush=True)
                yield row


def jpegs(folder: Path, limit: int) -> list[bytes]:
    """The first files of a folder, by name, that Pillow takes for JPEGs."""
    found = []
    for path in sorted(p for p in folder.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg"))[:limit]:
        try:
            with Image.open(path) as image:
                image.size  # noqa: B018 - reads the header
        except OSError as e:
            print(f"{path}: {e}", file=sys.stderr)
            continue
        found.append(path.read_bytes())
    return found


def inputs(count: int) -> dict[str, list[bytes]]:
    """Made JPEGs of one size, and of many."""
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="of JPEGs; without it some are made")
    parser.add_argument("--images", type=int, default=256, help="JPEGs of each kind, or files of the folder")
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--json", type=Path, help="also write the object here")
    given = parser.parse_args()
    device = torch.device("cuda", 0)
    began = time.perf_counter()
    torch.zeros(1, device=device if torch.cuda.is_available() else "cpu")
    context_s, began = time.perf_counter() - began, time.perf_counter()
    if (reason := available(device)) is not None:
        print(f"nothing to measure: {reason}", file=sys.stderr)
        return 1
    available_s = time.perf_counter() - began
    pictures = {str(given.folder): jpegs(given.folder, given.images)} if given.folder else inputs(given.images)
    if not all(pictures.values()):
        print(f"{given.folder}: no JPEGs", file=sys.stderr)
        return 2
    found = {
        "environment": environment(device=describe(device), driver=facts(device).get("driver"), decoder=decoder_name()),
        "context_s": round(context_s, 3),
        "available_s": round(available_s, 3),
        "bytes": {kind: sum(map(len, encoded)) for kind, encoded in pictures.items()},
        "rates": list(rates(device, pictures, given)),
    }
    print(json.dumps(found, indent=1))
    save(given.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
