"""Measure a scoring job over small JPEGs in an object store: when it begins to score, writes a shard, and ends.

    python scripts/measure_objects.py [--count 2000] [--size 64] [--rounds 3] [--latency 0.2] [--tree FOLDER ...]

The store is moto's server on this machine, in a process of its own, which answers LATENCY seconds late. Each job is a
process of its own, `nimble-jobs run` on the CPU in eager, from one checkout after the other if `--tree` names several.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

from nimble_jobs.objects import Objects
from tests.waiting import until

PICTURE = (300, 225)
SHARD = 200
SOURCE = "s3://pictures/in"


SERVER = """
import sys, time
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
app = DomainDispatcherApplication(create_backend_app)

def late(environ, start):
    if environ["REQUEST_METHOD"] == "GET":
        time.sleep(float(sys.argv[2]))
    return app(environ, start)

make_server("127.0.0.1", int(sys.argv[1]), late, threaded=True).serve_forever()
"""


@contextmanager
def store(latency_s: float) -> Iterator[None]:
    """A server, to which the environment points, with an empty bucket."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
        "AWS_SECRET_ACCESS_KEY": "nobody's",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    command = [sys.executable, "-c", SERVER, str(port), str(latency_s)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:

        def made() -> bool:
            request = urllib.request.Request(f"http://127.0.0.1:{port}/pictures", method="PUT")
            try:
                urllib.request.urlopen(request).close()
            except OSError:
                return False
            return True

        until(made)
        yield
    finally:
        server.terminate()
        server.wait()


def upload(count: int) -> int:
    """Put pictures into the store; their bytes."""
    rng, objects = np.random.default_rng(0), Objects(SOURCE)
    some = []
    for _ in range(50):
        coarse = Image.fromarray(rng.integers(0, 256, (19, 25, 3), dtype=np.uint8))
        file = io.BytesIO()
        coarse.resize(PICTURE, Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        some.append(file.getvalue())
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: objects.write(f"{i:06}.jpg", some[i % len(some)]), range(count)))
    return sum(len(some[i % len(some)]) for i in range(count))


def job(tree: Path, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Seconds from the start of a process to its first shard, and to its end."""
    spec = {
        "version": 1,
        "name": "objects",
        "kind": "score",
        "model": {"source": "torchvision:resnet18"},
        "input": {"source": SOURCE, "format": "images", "batch_size": 32, "transform": {"resize": options.size}},
        "output": {"path": str(folder / "out"), "format": "parquet", "fields": ["id", "top1"], "shard_size": SHARD},
        "schedule": {"on_miss": "eager"},
        "run": {"device": "cpu"},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(spec))
    command = [sys.executable, "-c", "from nimble_jobs.cli.main import main; raise SystemExit(main())"]
    command += ["--home", str(folder / "home"), "run", str(folder / "job.yaml"), "--json"]
    began = time.perf_counter()
    first = 0.0
    with subprocess.Popen(
        command,
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        while process.poll() is None:
            if not first and (any(folder.glob(".out.*/*/part-*")) or any(folder.glob("out/part-*"))):
                first = time.perf_counter() - began
            time.sleep(0.02)
        ended = time.perf_counter() - began
        assert process.stdout is not None
        said = json.loads(process.stdout.read())
    assert process.returncode == 0, said
    return {"first_s": first, "total_s": ended}


def main() -> None:
    """Measure each checkout in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds by which each GET is answered later")
    parser.add_argument("--tree", type=Path, nargs="+", default=[Path(__file__).parents[1]])
    options = parser.parse_args()
    with store(options.latency):
        nbytes = upload(options.count)
        print(f"{options.count:,} JPEGs, {nbytes / 1e6:.0f} MB")
        for number in range(options.rounds):
            for tree in options.tree:
                with tempfile.TemporaryDirectory(prefix="measure-objects-") as folder:
                    took = job(tree, Path(folder), options)
                said = f"{took['first_s']:.2f} s to the first shard, {took['total_s']:.2f} to the end"
                print(f"round {number}, {tree}: {said}, load {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
