"""What a worker's job with a Python model leaves to the next one: no old weights from files, and no settings."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nimble_jobs import spec as specs
from nimble_jobs.engine import device as devices
from nimble_jobs.engine import process_settings
from nimble_jobs.job import Job, JobState
from nimble_jobs.models import weights_identity
from nimble_jobs.models.files_read import files_read
from nimble_jobs.planner import Request
from nimble_jobs.planner.keys.request import key_parts, schedule_key
from nimble_jobs.spec.model import ModelSpec
from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.worker.executor import Station, execute, real_station
from tests.store_samples import queued

READS = {
    "numpy": "torch.from_numpy(np.load(HERE / 'w.npy'))",
    "torch": "torch.load(HERE / 'w.pt')",
    "safetensors": "load_file(HERE / 'w.safetensors')['w']",
    "in a folder": "load_file(HERE / 'more' / 'w.safetensors')['w'] + 0 * len((HERE / 'more' / 'c.json').read_text())",
    "at import": "READ_AT_IMPORT",
}
MODEL = """
import os
from pathlib import Path
import numpy as np
import torch
from safetensors.torch import load_file
HERE = Path(__file__).parent
READ_AT_IMPORT = torch.from_numpy(np.load(HERE / 'w.npy'))
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("w", {read})
    def forward(self, x):
        return x * self.w
def make():
    return Net()
"""
SETS = """
import os
import sys
import torch
torch.set_float32_matmul_precision("high")
torch.backends.mkldnn.conv.fp32_precision = "tf32"
torch.use_deterministic_algorithms(True)
torch.set_num_threads(1)
torch.set_default_device("cpu")
torch.set_grad_enabled(False)
torch.backends.cudnn.benchmark = True
os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
class Net(torch.nn.Module):
    def forward(self, x):
        return torch.full_like(x, float(torch.are_deterministic_algorithms_enabled()))
def make():
    os.chdir("/")
    sys.path.append("/nowhere")
    return Net()
"""


@dataclass
class Worker:
    """One process that runs jobs one after another."""

    store: Store
    station: Station
    folder: Path

    def score(self, name: str, **more: Any) -> tuple[Job, np.ndarray[Any, Any]]:
        """Run a job with the model of the folder; the job, and its one column."""
        np.save(self.folder / "x.npy", np.ones((6, 2), dtype=np.float32))  # the last batch of four is a short one
        spec = {
            "version": 1,
            "name": name,
            "kind": "score",
            "model": {"source": f"python:{self.folder}/model.py:make"},
            "input": {"source": str(self.folder / "x.npy"), "format": "npy", "batch_size": 4},
            "schedule": {"progressive": False},
            "output": {"path": str(self.folder / name), "format": "npy", "fields": ["output"]},
        }
        resolved = specs.dump(specs.restore(spec | more))
        store = self.store
        queued(store, spec=resolved, name=name, kind="score", allow_python=[str(self.folder)], now=time.time())
        job = store.jobs.claim("w", device="cpu", now=time.time())
        assert job is not None
        assert execute(job, self.station)
        job = store.jobs.get(job.id)
        assert job.state is JobState.SUCCEEDED, job.error
        return job, np.load(next((self.folder / name).rglob("*.output.npy")))


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    with open_store(resolve(str(tmp_path / "home"))) as store:
        station = real_station(store, "w", "cpu", None)
        (tmp_path / "model").mkdir()
        yield Worker(store, station, tmp_path / "model")
        station.close()


def save(folder: Path, value: float) -> None:
    """Weights in every form that `READS` reads, of the same size whatever the value."""
    from safetensors.torch import save_file

    w = torch.full((2,), value)
    (folder / "more").mkdir(exist_ok=True)
    (folder / "more" / "c.json").write_text("{}")
    np.save(folder / "w.npy", w.numpy())
    torch.save(w, folder / "w.pt")
    for place in (folder, folder / "more"):
        save_file({"w": w}, place / "w.safetensors")


@pytest.mark.parametrize("read", READS)
def test_weights_that_the_code_reads_may_change(worker: Worker, read: str) -> None:
    """A resident model serves the next job, unless one of its files is another one now."""
    (worker.folder / "model.py").write_text(MODEL.format(read=READS[read]))
    save(worker.folder, 2.0)
    _, outputs = worker.score("first")
    assert (outputs == 2).all()
    job, outputs = worker.score("again")
    assert (job.schedule["hit"], outputs.max()) == ("resident", 2)
    save(worker.folder, 3.0)
    job, outputs = worker.score("changed")
    assert (job.schedule["hit"], outputs.min()) == ("stored", 3)
    log = (worker.store.home / "logs" / f"{job.id}.log").read_text()
    assert "has changed" in log
    job, _ = worker.score("resident-again")
    assert job.schedule["hit"] == "resident"


def test_settings_of_a_model_are_its_own(worker: Worker) -> None:
    """The next job begins with the settings of before; the same model, resident, gets its own again."""
    (worker.folder / "model.py").write_text(SETS)
    before = process_settings.taken()
    for name, hit in (("first", "miss"), ("again", "resident")):
        job, outputs = worker.score(name)
        assert (job.schedule["hit"], outputs.min()) == (hit, 1)  # the short batch, in eager, asks for the setting
        assert process_settings.taken() == before
    log = (worker.store.home / "logs" / f"{job.id}.log").read_text()
    assert "float32_matmul_precision" in log
    assert "deterministic algorithms" in log


def test_settings_are_put_back_after_a_failure(worker: Worker) -> None:
    before = process_settings.taken()
    (worker.folder / "model.py").write_text(SETS.replace("return Net()", "raise ValueError('no')"))
    with pytest.raises(AssertionError, match="ValueError: no"):
        worker.score("fails")
    assert process_settings.taken() == before


def test_what_an_import_sets_is_set_at_the_next_build(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python imports a package once; its settings are put back after the job, and made again without it."""
    package = worker.folder.parent / "packages" / "sets_at_import"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import torch\ntorch.use_deterministic_algorithms(True)\n")
    monkeypatch.syspath_prepend(package.parent)
    main = "import sets_at_import\n" + SETS.replace("torch.use_deterministic_algorithms(True)\n", "")
    (worker.folder / "model.py").write_text(main.replace("def make():", "def make(seed=0):"))
    before = process_settings.taken()
    source = f"python:{worker.folder}/model.py:make"
    for number in range(3):
        job, outputs = worker.score(f"args-{number}", model={"source": source, "args": {"seed": number}})
        assert (job.schedule["hit"], outputs.min()) == ("miss", 1)
        assert process_settings.taken() == before


def test_what_cannot_be_set_fails_no_job(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    """A model's working folder that is gone by the second job."""
    (worker.folder / "gone").mkdir()
    code = SETS.replace('os.chdir("/")', f'os.chdir("{worker.folder}/gone")')
    (worker.folder / "model.py").write_text(code)
    worker.score("first")
    (worker.folder / "gone").rmdir()
    job, _ = worker.score("again")
    assert job.schedule["hit"] == "resident"
    assert "working folder" in caplog.text
    assert "could not be set" in caplog.text


def test_buckets_of_a_model_that_changes_settings_have_steady_keys(tmp_path: Path) -> None:
    """Facts that were noted before the model's code ran are in the keys of all of them."""
    (tmp_path / "model.py").write_text("import torch\ndef make():\n    return torch.nn.Linear(3, 2)\n")
    request = Request(
        model=ModelSpec(source=f"python:{tmp_path}/model.py:make"), shape=(3,), dtype="float32", batch_size=4
    )
    cpu = torch.device("cpu")
    facts, before = devices.facts(cpu), process_settings.taken()
    key = schedule_key(key_parts(request, cpu))
    try:
        torch.use_deterministic_algorithms(True)
        assert schedule_key(key_parts(request, cpu)) != key
        assert schedule_key(key_parts(request, cpu, facts)) == key
    finally:
        process_settings.put(before)


def test_what_counts_as_read(tmp_path: Path) -> None:
    """Data does, also through a descriptor of `os.open`; code, libraries, and what is written do not."""
    for name in ("data.json", "model.py", "other.txt", "mapped.dat", "thread.txt"):
        (tmp_path / name).write_text("1")
    with files_read(tmp_path / "model.py") as read:
        (tmp_path / "data.json").read_text()
        os.close(os.open(tmp_path / "other.txt", os.O_RDONLY))
        with (tmp_path / "mapped.dat").open("r+b") as file:
            file.read()
        with ThreadPoolExecutor(1) as pool:
            pool.submit((tmp_path / "thread.txt").read_text).result()
        (tmp_path / "model.py").read_text()
        (tmp_path / "written.txt").write_text("1")
        (tmp_path / "unpacked.txt").write_text("1")
        (tmp_path / "unpacked.txt").read_text()
        (tmp_path / "unpacked.txt").unlink()
        Path(pytest.__file__).read_text()
        Path("/proc/self/stat").read_text()
        assert not (tmp_path / "missing").exists()
    assert read.changed() is None
    for name in ("model.py", "written.txt"):
        (tmp_path / name).write_text("22")
    assert read.changed() is None
    (tmp_path / "other.txt").unlink()
    assert read.changed() == str(tmp_path / "other.txt")
    (tmp_path / "later.txt").write_text("1")
    assert {Path(path).name for path in read.paths} == {"data.json", "other.txt", "mapped.dat", "thread.txt"}


def test_files_that_arguments_name_are_weights(tmp_path: Path) -> None:
    """Given as they are, in a list, or by their folder; and they are part of what a job may take over from another."""
    (tmp_path / "model.py").write_text("make = None")
    (tmp_path / "w").mkdir()
    file = tmp_path / "w" / "net.safetensors"
    file.write_bytes(b"1")

    def of(args: dict[str, Any]) -> str:
        return weights_identity(ModelSpec(source=f"python:{tmp_path}/model.py:make", args=args))

    assert of({"size": 3, "name": "", "missing": str(tmp_path / "no")}) == "seed:0"
    every = ({"path": str(file)}, {"of": [{"a": str(file)}]}, {"folder": str(tmp_path / "w")})
    before = [of(args) for args in every]
    assert "seed:0" not in before
    file.write_bytes(b"22")
    assert all(of(args) != old for args, old in zip(every, before, strict=True))


def _another(name: str, value: Any) -> Any:
    """A value that this setting may have, too."""
    if isinstance(value, bool):
        return not value
    if name == "threads":
        return value + 1
    if name == "default device":
        return "meta"
    if name == "cuda.preferred_blas_library":
        return torch._C._BlasBackend.Cublaslt if value == torch._C._BlasBackend.Cublas else torch._C._BlasBackend.Cublas
    others: dict[Any, Any] = {None: "0", "highest": "high", "none": "tf32", "tf32": "none"}
    return (others | {(False, False): (True, True), torch.float32: torch.float64})[value]


@pytest.mark.parametrize("name", [n for n in process_settings.taken() if n not in ("sys.path", "working folder")])
def test_each_setting_is_put_back(name: str) -> None:
    """None of them depends on another one, or on the order in which they were set."""
    before = process_settings.taken()
    other = _another(name, before[name])
    assert other != before[name]
    try:
        process_settings.put({name: other})
        assert process_settings.taken()[name] == other
    finally:
        process_settings.put(before)
    assert process_settings.taken() == before
    assert sys.path == before["sys.path"]
