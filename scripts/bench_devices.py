"""One scoring job over all GPUs of a host beside the same job on one of them: how it scales, and if outputs are equal.

    python scripts/bench_devices.py [--devices all] [--parts npy,jpeg] [--faults kill,stop,fault] [--json FILE]

One worker has all devices. Each model is resident on each of them before anything is measured, so measured jobs build
and load nothing. Then jobs over one device (`run.gpus: 1`) and over all take turns. Prints a line of JSON for each job,
and one for each part that compares them:

- `ratio`: records a second of several devices, over N times those of one, as the jobs' own timings say: for one device
  from its first batch to its last, for several from the moment when the first of them joined
- `ratio_steady`: the same from a tenth to nine tenths of the records, so without beginning and end
- `ratio_wall`: the same from being queued to being published, so with all that happens once a job
- `ratio_bare`: records a second of several devices over N times those of the bare replay of the schedule (npy)

`cores_busy` is how many cores the worker's processes used on average. In the jobs that are disturbed, after a third of
the records, one device's process is killed, or stopped, or faults. Each has to end in its first attempt with an output
equal to one device's. Exit code 1 if one does not, or if any output differs.

With the defaults, on two H100s: about 15 s to make inputs and start; for each of npy and jpeg up to 60 s to build the
schedule, once, and 15 s a round; 25 s for kill, 40 s for stop, 40 s for fault. Schedules and inputs stay in --folder,
so a second call is quicker. On CPUs: --devices cpu,cpu --model squeezenet1_1 --size 32 --dtype fp32 --fuse off
--records 20000 --jpegs 2000 --fault-records 10000.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import devices_inputs as inputs
import yaml
from devices_jobs import Disturb, Host, compared, succeeded, worker
from measuring import environment, save

from nimble_jobs.bench.process import ProcessDied
from nimble_jobs.bench.scoring.ours import array_input, picture_input
from nimble_jobs.bench.scoring.workshop import Workshop
from nimble_jobs.errors import UsageError
from nimble_jobs.store import open_store
from nimble_jobs.store.home import resolve

Row = dict[str, Any]
_WARM_TURNS = 5
_EACH = 4096  # records of the npy file
_DIFFERENT = 2048  # JPEGs


def main() -> int:
    """Measure, print, write the JSON; whether all was well."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the worker is ended, too
    if options.devices.startswith("cpu"):  # each device is one core
        os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with open_store(resolve(str(folder / "home"))) as store:
            bench = Bench(options, folder.resolve())
            parts = options.parts.split(",")
            given: dict[str, Row] = {}
            if "npy" in parts:
                given["npy"] = bench.arrays(options.records)
            if "jpeg" in parts:
                given["jpeg"] = bench.pictures()
            faulty = bench.arrays(options.fault_records) if "fault" in options.faults else None
            with worker(store, options.devices, bench.folder) as host:
                bench.tell({"what": "ready", "devices": host.count})
                for part, read in given.items():
                    bench.part(host, part, read, [f for f in options.faults if f != "fault" and part == "npy"])
                if faulty is not None:
                    bench.fault(host, faulty)
    return 0 if bench.well else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="all", help="all, or a list such as cuda:0,cuda:1 or cpu,cpu")
    parser.add_argument("--parts", default="npy,jpeg", help="what is measured; kill and stop come with npy")
    parser.add_argument("--faults", default="kill,stop,fault", help="comma-separated; empty: none")
    parser.add_argument("--model", default="resnet50", help="a name of torchvision")
    parser.add_argument("--size", type=int, default=224, help="height and width of what the model gets, pixels")
    parser.add_argument("--dtype", default="fp16")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--fuse", default="auto", choices=["auto", "off", "max"])
    parser.add_argument("--records", type=int, default=327_680, help="of the npy job")
    parser.add_argument("--jpegs", type=int, default=131_072, help=f"500x375; {_DIFFERENT:,} are different")
    parser.add_argument("--fault-records", type=int, default=65_536, help="of the jobs with fault, which run in eager")
    parser.add_argument("--shard", type=int, default=2048, help="output.shard_size")
    parser.add_argument("--decode", default="auto", choices=["auto", "cpu", "gpu"])
    parser.add_argument("--photos", type=Path, help="photographs; default: scikit-image's and -learn's, else drawings")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--stall", default="10s", help="run.stall of the job with stop")
    parser.add_argument("--no-bare", action="store_true", help="do not measure the bare replay, which takes about 10 s")
    parser.add_argument(
        "--folder", type=Path, help="where inputs, schedules and outputs stay; default: a temporary one"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.faults = [fault for fault in options.faults.split(",") if fault]
    if unknown := {*options.faults} - {"kill", "stop", "fault"} | {*options.parts.split(",")} - {"npy", "jpeg", ""}:
        parser.error(f"found {', '.join(sorted(unknown))}; expected faults kill, stop, fault and parts npy, jpeg")
    return options


class Bench:
    """What was asked for, and what was found so far."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.folder, self.well = folder, True
        self._options = options
        self._device = "cpu" if options.devices.startswith("cpu") else "cuda"
        self._model = {"source": f"torchvision:{options.model}", "dtype": options.dtype}
        self._rows: list[Row] = []
        self._began = time.monotonic()
        settings = {name: str(v) if isinstance(v, Path) else v for name, v in vars(options).items() if name != "json"}
        self._environment = environment(options=settings)

    def tell(self, row: Row) -> None:
        """Print a row at once, and keep it."""
        row = {"at_s": round(time.monotonic() - self._began, 1), **row}
        self._rows.append(row)
        print(json.dumps(row), flush=True)
        save(self._options.json, {"environment": self._environment, "results": self._rows})

    def arrays(self, records: int) -> Row:
        """`input` of a job over so many records."""
        size, batch = self._options.size, self._options.batch
        return array_input(inputs.array_files(self.folder, records, size, _EACH), batch)

    def pictures(self) -> Row:
        """`input` of a job over JPEGs."""
        options = self._options
        images, made_from = inputs.picture_files(self.folder, options.jpegs, _DIFFERENT, options.photos)
        self._environment["jpegs_made_from"] = made_from
        return picture_input(images, options.size, options.batch, options.decode)

    def part(self, host: Host, part: str, read: Row, faults: Sequence[str]) -> None:
        """Jobs over one device and over all, in turns, and jobs over all that are disturbed."""
        one, several = self._spec(f"{part}-one", read), self._spec(f"{part}-all", read, gpus="all")
        self._warm(host, several)
        ones, all_, pairs = list[Row](), list[Row](), list[Row]()
        for number in range(self._options.rounds):
            ones.append(self._scored(host, one, round=number))
            all_.append(self._scored(host, several, round=number))
            pairs.append(compared(self._output(one), self._output(several)))
        bare = self._bare(several) if part == "npy" else {}
        self._compare(host, part, (ones, all_, pairs), bare)
        for fault in faults:
            run: Row = {"stall": self._options.stall} if fault == "stop" else {}
            spec = self._spec(f"{part}-{fault}", read, gpus="all", **run)
            self._warm(host, several)
            self._disturbed(host, spec, one, host.kill if fault == "kill" else host.stop)

    def fault(self, host: Host, read: Row) -> None:
        """A device faults in a model of Python code. It runs in eager: a replay calls no Python code."""
        (self.folder / "model.py").write_text(inputs.MODEL.format(model=self._options.model))
        (self.folder / "fault").unlink(missing_ok=True)
        self._model = {"source": f"python:{self.folder / 'model.py'}:Faulty", "dtype": self._options.dtype}
        eager = {"on_miss": "eager"}
        one = self._spec("fault-one", read, schedule=eager)
        self._scored(host, one)
        several = self._spec("fault-all", read, schedule=eager, gpus="all")
        self._warm(host, several)
        self._disturbed(host, several, one, host.fault)

    def _spec(self, name: str, read: Row, *, schedule: Row | None = None, **run: Any) -> Path:
        path = self.folder / f"{name}.yaml"
        spec = {
            "version": 1,
            "name": name,
            "kind": "score",
            "model": self._model,
            "input": read,
            "schedule": schedule or {"fuse": self._options.fuse, "progressive": False},
            "output": {
                "path": str(self._output(path)),
                "format": "parquet",
                "fields": ["id", "top1", "probability"],
                "if_exists": "replace",
                "shard_size": self._options.shard,
            },
            "run": {"device": self._device, **run},
        }
        path.write_text(yaml.safe_dump(spec))
        return path

    def _output(self, spec: Path) -> Path:
        return self.folder / "out" / spec.stem

    def _warm(self, host: Host, spec: Path) -> None:
        """Have every device score something, so that the model is resident on all."""
        for _ in range(_WARM_TURNS):
            found = self._scored(host, spec, warming=True)
            if sum(member["records"] > 0 for member in found["members"]) == host.count:
                return
        raise SystemExit(f"after {_WARM_TURNS} jobs not every device has scored something; use more records")

    def _scored(self, host: Host, spec: Path, disturb: Disturb | None = None, **more: Any) -> Row:
        """Run a job, and tell its figures. Raises SystemExit if it fails."""
        found = host.score(spec, disturb)
        if "card" not in self._environment and found["members"]:
            self._environment["card"] = found["members"][0]["card"]
        self.tell({"what": spec.stem, **more, **found})
        if disturb is None and not succeeded(found):
            raise SystemExit(f"{spec.stem}: {found['state']}: {found['error']}")
        return found

    def _compare(self, host: Host, part: str, rounds: tuple[list[Row], list[Row], list[Row]], bare: Row) -> None:
        ones, several, pairs = rounds
        steady_one, steady = (_median(rows, "steady_records_per_s") for rows in (ones, several))
        one, rate, wall_one, wall_rate = (
            median(row[name] for row in rows)
            for name in ("records_per_s", "wall_records_per_s")
            for rows in (ones, several)
        )
        worst = next((pair for pair in pairs if not pair["equal"]), pairs[-1])
        row = {
            "what": f"{part}: {host.count} devices beside one",
            "one_records_per_s": one,
            "records_per_s": rate,
            "ratio": round(rate / (host.count * one), 3),
            "steady_one_records_per_s": steady_one,
            "steady_records_per_s": steady,
            "ratio_steady": round(steady / (host.count * steady_one), 3) if steady and steady_one else None,
            "ratio_wall": round(wall_rate / (host.count * wall_one), 3),
            "hits": sorted({row["hit"] for row in (*ones, *several)}),
            **bare,
            **worst,
        }
        if bare.get("bare_records_per_s"):
            row["one_ratio_bare"] = round(one / bare["bare_records_per_s"], 3)
            row["ratio_bare"] = round(rate / (host.count * bare["bare_records_per_s"]), 3)
        self.tell(row)
        self.well &= worst["equal"]

    def _bare(self, spec: Path) -> Row:
        """What the device alone can do, without reading, decoding and copies."""
        if self._options.no_bare:
            return {}
        shop = Workshop(folder=self.folder, home=self.folder / "home", log=self.folder / "bare.log", limit_s=120.0)
        try:
            found = shop.step("bare", {"spec": str(spec), "home": str(shop.home), "allow_python": []})
        except (UsageError, ProcessDied) as e:
            return {"bare_error": str(e)}
        return {"bare_records_per_s": round(found["records_per_s"], 1), "in_flight": found["in_flight"]}

    def _disturbed(self, host: Host, spec: Path, one: Path, disturb: Callable[[], str]) -> None:
        """One job during which something happens, beside the output of one device."""
        found = self._scored(host, spec, disturb)
        row: Row = {"what": f"{spec.stem}: {disturb.__name__}", "disturbed": found["disturbed"]}
        if found["state"] == "succeeded":
            row |= compared(self._output(one), self._output(spec))
        began = time.monotonic()
        host.ready()
        row |= {
            "in_one_attempt": succeeded(found),
            "failures": sum(member["failures"] for member in found["members"]),
            "copies": found["copies"],
            "ready_again_s": round(time.monotonic() - began, 1),
        }
        self.tell(row)
        self.well &= bool(row.get("equal")) and row["in_one_attempt"] and row["disturbed"] is not None


def _median(rows: Sequence[Row], name: str) -> float | None:
    """None if a row lacks it."""
    values = [row[name] for row in rows]
    return None if None in values else median(values)


if __name__ == "__main__":
    sys.exit(main())
