"""What the commands about jobs print and how they exit, over jobs in every state."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nimble_jobs import client
from nimble_jobs.cli import doctor, progress
from nimble_jobs.cli import submit as cli_submit
from nimble_jobs.job import Job, JobState
from nimble_jobs.spec import dump, load
from nimble_jobs.store import Store, WorkerInfo
from tests.bad_specs import FINETUNE, SCORE, lay_out
from tests.cli import Cli
from tests.store_samples import queued

ROW = {
    *("id", "name", "kind", "state", "attempt", "created_at", "started_at", "finished_at"),
    *("records_done", "records_total", "error"),
}
ISO = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path / "home", capsys)


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    lay_out(tmp_path)
    path = tmp_path / "job.yaml"
    path.write_text(SCORE)
    return path


def end(store: Store, job: Job, state: JobState, worker: str = "w") -> None:
    """Bring a queued job to its end as a worker would."""
    now = time.time()
    if state is JobState.CANCELLED:
        store.jobs.cancel(job.id, now)
        return
    claimed = store.jobs.claim(worker, device="cpu", now=now)
    assert claimed is not None
    assert claimed.id == job.id
    if state is JobState.SUCCEEDED:
        store.jobs.progress(job.id, 1, done=360, total=360, bad=0)
        outputs = {"path": "/out", "files": ["part-00000.parquet"], "records": 360, "bytes": 1}
        schedule = {
            "key": "abcd",
            "hit": "stored",
            "runs": "schedule",
            "replay_us": 50.0,
            "eager_us": 100.0,
            "device": "a GPU",
        }
        timings = {"load_s": 0.1, "build_s": 0.0, "run_s": 0.5, "records_per_s": 720.0}
        store.jobs.finish(job.id, 1, outputs=outputs, timings=timings, schedule=schedule, now=now + 1)
    elif state is not JobState.RUNNING:
        store.jobs.fail(job.id, 1, error="no such file", retry=False, lost=False, now=now + 1)


def submit(store: Store, spec: Path, name: str) -> Job:
    """Queue a job as `submit` does."""
    loaded = load(spec)
    return queued(store, spec=dump(loaded), name=name, kind=loaded.kind, now=time.time())


@pytest.fixture
def jobs(cli: Cli, spec: Path) -> Iterator[dict[str, str]]:
    """A job in each of five states; their ids by state. The process of the running one is alive."""
    ids = {}
    store = cli.store()
    lease = store.workers.hold({"role": "run"})
    for state in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.RUNNING, JobState.QUEUED):
        job = submit(store, spec, f"{state}-job")
        if state is not JobState.QUEUED:
            end(store, job, state, lease.id)
        ids[state.value] = job.id
    store.close()
    yield ids
    lease.release()


def test_attempts_that_went_back_to_the_queue_are_not_counted(cli: Cli, spec: Path) -> None:
    """`show` never says 4 of 3: only tries that failed use up what run.retry allows."""
    store = cli.store()
    job = submit(store, spec, "often")
    with store.workers.hold({"role": "worker"}) as lease:
        for number in range(1, 5):
            assert store.jobs.claim(lease.id, device="cpu", now=time.time()) is not None
            if number < 4:
                store.jobs.requeue(job.id, number, reason="the worker stops", now=time.time())
        assert "job.attempt: 4; 1 of 3 without 3 that went back to the queue" in cli("show", job.id).out.splitlines()
        store.jobs.fail(job.id, 4, error="no such file", retry=False, lost=False, now=time.time())
        assert cli("retry", job.id).code == 0
        assert store.jobs.claim(lease.id, device="cpu", now=time.time()) is not None
        assert "job.attempt: 5; 1 of 3 since the last retry" in cli("show", job.id).out.splitlines()
    store.close()


def test_submit_prints_the_id_and_says_that_no_worker_runs(cli: Cli, spec: Path) -> None:
    """stdout holds the id alone; stderr tells how to start a worker; the job is in the store."""
    answer = cli("submit", spec)
    assert answer.code == 0
    assert answer.lines == ["no worker is running; start one with: nimble-jobs worker start --detach"]
    assert [row["id"] for row in cli("ls", "--json").json] == [answer.out.strip()]


def test_submit_takes_overrides_and_options(cli: Cli, spec: Path) -> None:
    """Overrides change the spec; priority, after, key and delay change the job."""
    first = cli("submit", spec, "--quiet").out.strip()
    before = time.time()
    options = ["--priority", "7", "--after", first, "--key", "nightly", "--delay", "10m"]
    second = cli("submit", spec, "input.batch_size=8", *options).out.strip()
    after = time.time()
    shown = cli("show", second, "--json").json
    assert (shown["priority"], shown["after"], shown["key"]) == (7, [first], "nightly")
    assert shown["spec"]["input"]["batch_size"] == 8
    store = cli.store()
    assert before + 600 <= store.jobs.get(second).not_before <= after + 600
    store.close()


def test_submit_wait_starts_a_worker_once_the_job_is_due(cli: Cli, spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was started before, or ran at the time, may have left by then."""
    started: list[str] = []

    def start(*, store: Store, device: str, max_idle_s: float) -> None:
        (job,) = store.jobs.list()
        assert job.not_before <= time.time()
        started.append(device)
        if len(started) > 1:  # the first one leaves at once
            end(store, job, JobState.SUCCEEDED)

    monkeypatch.setattr(client, "start_worker", start)
    monkeypatch.setattr(cli_submit, "_LOOK_S", 0.0)
    answer = cli("submit", spec, "--wait", "--delay", "0.3s", "--timeout", "120s", "run.device=cpu")
    assert (answer.code, started) == (0, ["cpu", "cpu"])
    assert "no worker" not in answer.err


def test_submit_says_when_no_worker_takes_the_job(cli: Cli, spec: Path) -> None:
    """A worker on another device does not count, nor does one that leaves."""
    store = cli.store()
    with store.workers.hold({"role": "worker", "device": "cpu"}) as lease:
        assert cli("submit", spec).lines == []
        assert cli("submit", spec, "run.device=cuda").lines == [
            "no worker for cuda is running (only on cpu); "
            "start one with: nimble-jobs worker start --detach --device cuda"
        ]
        lease.update(status="draining")
        assert "no worker is running" in cli("submit", spec).err
    store.close()


def test_submit_says_when_no_machine_has_as_many_devices(cli: Cli, tmp_path: Path) -> None:
    """A worker takes no training on more devices than its machine has."""
    store, spec = cli.store(), training_on(tmp_path, "device: cuda\n  gpus: 2")
    with store.workers.hold({"role": "worker", "device": "cuda:0", "status": "ready", "most_ranks": 1}) as lease:
        said = "run.gpus: found 2, but no worker's machine has so many devices (cuda:0: 1)"
        assert cli("submit", spec).lines == [f"{said}; start a worker on a larger one, or ask for fewer"]
        assert cli("submit", spec, "run.gpus=1").lines == []
        lease.update(most_ranks=2)
        assert cli("submit", spec).lines == []
    store.close()


def test_submit_says_that_a_cpu_is_no_gpus(cli: Cli, tmp_path: Path) -> None:
    """A worker on a CPU takes a training on several GPUs only if it asks for that device."""
    store, spec = cli.store(), training_on(tmp_path, "gpus: 2")
    with store.workers.hold({"role": "worker", "device": "cpu", "status": "ready", "most_ranks": 8}) as lease:
        assert cli("submit", spec).lines == [
            "no worker for run.gpus: 2 is running (only on cpu); "
            "start one with: nimble-jobs worker start --detach --device cuda, or set run.device: cpu"
        ]
        assert cli("submit", spec, "run.device=cpu").lines == []
        lease.update(device="cuda:0")
        assert cli("submit", spec).lines == []
    store.close()


def test_submit_wait_starts_one_worker_for_what_no_worker_of_this_machine_can_take(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is cancelled, as one for a device that is not there."""
    started: list[str] = []

    def start(*, store: Store, device: str, max_idle_s: float) -> list[WorkerInfo]:
        started.append(device)
        info = {"most_ranks": 2}
        return [WorkerInfo(id="0-w", pid=1, device="cpu", started_at=0.0, status="ready", info=info)]

    monkeypatch.setattr(client, "start_worker", start)
    monkeypatch.setattr(cli_submit, "_LOOK_S", 0.0)
    answer = cli("submit", training_on(tmp_path, "device: cpu\n  gpus: 4"), "--wait", "--timeout", "60s")
    assert (answer.code, started) == (2, ["cpu"])
    assert "run.gpus: found 4, but no worker's machine has so many devices (cpu: 2 cores)" in answer.err
    assert [row["state"] for row in cli("ls", "--json").json] == ["cancelled"]


def training_on(folder: Path, run: str) -> Path:
    """A spec of a training, with these lines in `run`."""
    lay_out(folder)
    path = folder / "training.yaml"
    path.write_text(FINETUNE.replace("device: auto", run))
    return path


def test_a_key_gives_the_job_that_exists(cli: Cli, spec: Path) -> None:
    """The same key with the same spec is the same job; with another spec it is an error and queues nothing."""
    first = cli("submit", spec, "--key", "k").out
    assert cli("submit", spec, "--key", "k").out == first
    answer = cli("submit", spec, "input.batch_size=8", "--key", "k")
    assert (answer.code, answer.out) == (2, "")
    assert len(cli("ls", "--json").json) == 1


def test_ls_rows_hold_what_was_promised(cli: Cli, jobs: dict[str, str]) -> None:
    """Every row has the keys of the contract, and times in UTC."""
    rows = cli("ls", "--json").json
    assert {row["state"] for row in rows} == set(jobs)
    for row in rows:
        assert set(row) >= ROW
        assert ISO.fullmatch(row["created_at"])
    assert [row["id"] for row in rows] == list(reversed(jobs.values()))


@pytest.mark.parametrize(
    ("options", "states"),
    [
        (["--filter", "state=failed"], ["failed"]),
        (["--filter", "state!=failed", "--filter", "records_done>100"], ["succeeded"]),
        (["--filter", "elapsed_s<1h", "--filter", "name=*ed-job", "--sort", "name"], ["failed", "succeeded"]),
        (["--filter", "error=null", "--sort", "-name", "--limit", "2"], ["succeeded", "running"]),
        (["--filter", "records_per_s>=720"], ["succeeded"]),
    ],
)
def test_ls_selects(cli: Cli, jobs: dict[str, str], options: list[str], states: list[str]) -> None:
    """Filters, order and limit apply to what --json prints, and -q prints ids only."""
    assert [row["state"] for row in cli("ls", "--json", *options).json] == states
    assert cli("ls", "-q", *options).out.split() == [jobs[state] for state in states]


def test_ls_in_a_pipe_is_tab_separated(cli: Cli, jobs: dict[str, str]) -> None:
    """Without a terminal: a header, a line a job, tabs, no colours."""
    header, *lines = cli("ls").out.splitlines()
    assert header.split("\t")[:2] == ["ID", "NAME"]
    assert len(lines) == len(jobs)
    assert all(line.count("\t") == header.count("\t") for line in lines)
    assert "\x1b" not in header + "".join(lines)


def test_show_holds_what_was_promised(cli: Cli, jobs: dict[str, str]) -> None:
    """`show --json` adds spec, schedule, timings and outputs to the row, with attempts and events."""
    shown = cli("show", jobs["succeeded"], "--json").json
    assert set(shown) >= ROW | {"spec", "schedule", "timings", "outputs", "attempts", "events"}
    assert (shown["schedule"]["hit"], shown["timings"]["records_per_s"]) == ("stored", 720.0)
    assert [attempt["outcome"] for attempt in shown["attempts"]] == ["succeeded"]
    assert shown["events"][0]["kind"] == "submitted"


def test_a_build_names_the_candidate_that_is_tried(
    cli: Cli, jobs: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """`show` and the lines of `run` and `wait` say what is tried while a schedule is built, and not afterwards."""
    store, lines, seen = cli.store(), progress.Lines(), []
    for phase, schedule in (("build", {"trying": "eager kernels, 2 streams"}), ("run", {"hit": "miss"})):
        store.jobs.progress(jobs["running"], 1, done=0, total=None, bad=0, phase=phase, schedule=schedule)
        shown = cli("show", jobs["running"]).out
        assert ("schedule.trying: eager kernels, 2 streams" in shown) == (phase == "build")
        lines.update([store.jobs.get(jobs["running"])])
        seen.append(capsys.readouterr().err.strip().partition(jobs["running"])[2])
    assert seen == [" running build: eager kernels, 2 streams", " running run built"]
    store.close()


def test_show_names_the_device_of_a_speed(cli: Cli, jobs: dict[str, str]) -> None:
    """For people, the replay is set against eager, with the device that both ran on."""
    out = cli("show", "succeeded-job").out
    assert "schedule.speed: replay 50.0µs, eager 100.0µs, 2.00× on a GPU" in out.splitlines()


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["show", "nothing-like-it"], 102),
        (["logs", "nothing-like-it"], 102),
        (["wait", "nothing-like-it"], 102),
        (["cancel", "nothing-like-it"], 102),
        (["cache", "show", "0123456789"], 102),
        (["cache", "rm", "0123456789", "--yes"], 102),
        (["worker", "stop", "9-none"], 102),
    ],
)
def test_what_is_not_found(cli: Cli, args: list[str], code: int) -> None:
    """An unknown job or schedule gives 102 and one line."""
    answer = cli(*args)
    assert (answer.code, answer.out, len(answer.lines)) == (code, "", 1)


@pytest.mark.parametrize(
    ("states", "code"),
    [
        (["succeeded"], 0),
        (["succeeded", "failed"], 100),
        (["cancelled"], 103),
        (["cancelled", "failed"], 100),
        (["queued"], 101),
        (["running", "succeeded"], 101),
    ],
)
def test_wait_exits_as_its_jobs_ended(cli: Cli, jobs: dict[str, str], states: list[str], code: int) -> None:
    """0 when all succeeded, 100 when one failed, 103 when one was cancelled, 101 when time ran out."""
    answer = cli("wait", *(jobs[state] for state in states), "--timeout", "0.1s", "--quiet")
    assert (answer.code, answer.out) == (code, "")
    if code == 100:
        assert "no such file" in answer.err


def test_wait_prints_rows_as_json(cli: Cli, jobs: dict[str, str]) -> None:
    """`wait --json` prints the final rows on stdout even when a job failed."""
    answer = cli("wait", jobs["succeeded"], jobs["failed"], "--json")
    assert (answer.code, [row["state"] for row in answer.json]) == (100, ["succeeded", "failed"])


def test_cancel(cli: Cli, jobs: dict[str, str]) -> None:
    """A queued job is cancelled at once, a running one is asked, an ended one stays as it is."""
    wanted = [jobs[state] for state in ("queued", "running", "succeeded")]
    assert [row["state"] for row in cli("cancel", *wanted, "--json").json] == ["cancelled", "running", "succeeded"]
    assert cli("show", jobs["running"], "--json").json["cancel_requested"] is True


def test_cancel_now_does_not_ask(cli: Cli, jobs: dict[str, str]) -> None:
    """`cancel --now` ends a running job without its worker's consent."""
    assert cli("cancel", jobs["running"], "--now", "--json").json[0]["state"] == "cancelled"
    assert cli("wait", jobs["running"]).code == 103


@pytest.mark.parametrize("option", [["--device", "gpu"], ["--max-idle", "soon"], ["--gpu-memory", "much"]])
def test_worker_start_refuses_what_it_cannot_read(cli: Cli, option: list[str]) -> None:
    """Before any process starts, with one line that names the option."""
    answer = cli("worker", "start", "--detach", *option)
    assert (answer.code, answer.out, len(answer.lines)) == (2, "", 1)
    assert answer.err.startswith(f"nimble-jobs: {option[0]}: found {option[1]!r}; expected ")


def test_logs_says_when_there_is_none(cli: Cli, jobs: dict[str, str]) -> None:
    """A job that has not run has no log; one that has, prints it."""
    answer = cli("logs", jobs["queued"])
    assert (answer.code, answer.out, answer.lines) == (
        0,
        "",
        [f"queued-job {jobs['queued']} is queued and has no log yet"],
    )
    (cli.home / "logs" / f"{jobs['failed']}.log").write_text("what happened\n")
    assert cli("logs", jobs["failed"], "--follow").out == "what happened\n"


def test_an_unsafe_state_folder_is_refused(cli: Cli) -> None:
    """A folder that others can write to is not used; the line says what to do."""
    cli.home.mkdir()
    cli.home.chmod(0o777)
    answer = cli("ls")
    assert (answer.code, answer.out, len(answer.lines)) == (1, "", 1)
    assert "others can write to it" in answer.err


def test_cache_dir_prints_the_state_folder(cli: Cli) -> None:
    """For scripts that want to know where things are."""
    assert cli("cache", "dir").out == f"{cli.home}\n"


def test_doctor_finds_a_fresh_folder_sound(cli: Cli) -> None:
    """Exit code 0, and every finding named."""
    answer = cli("doctor", "--no-device", "--json")
    assert (answer.code, answer.json["ok"]) == (0, True)
    assert {"python", "torch", "sqlite", "home", "store", "workers"} <= {f["name"] for f in answer.json["findings"]}


@pytest.mark.parametrize("kept", [True, False])
def test_doctor_says_that_modules_are_compiled_each_time(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """If nobody has compiled them, and Python may not keep what it compiles."""
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "bytecode"))
    monkeypatch.setattr(sys, "dont_write_bytecode", not kept)
    answer = cli("doctor", "--no-device", "--json")
    found = [f for f in answer.json["findings"] if f["name"] == "bytecode"]
    assert (answer.code, len(found)) == (0, 0 if kept else 1)
    assert kept or (found[0]["status"] == "note" and "torch" in found[0]["detail"])


@pytest.mark.parametrize(("given", "noted"), [(None, False), ("32", False), ("1", True), ("8", True), ("many", True)])
def test_doctor_says_that_cuda_has_few_queues(monkeypatch: pytest.MonkeyPatch, given: str | None, noted: bool) -> None:
    """On a machine with a GPU. The variable is often set to 1 for other trainings."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given or "")
    if given is None:
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    found = list(doctor._queues())
    assert [f.status for f in found] == ["note"] * noted
    assert all("CUDA_DEVICE_MAX_CONNECTIONS is" in f.detail and "unset it" in f.detail for f in found)


def test_doctor_finds_a_smashed_database(cli: Cli) -> None:
    """Exit code 100 and a finding that says what is wrong."""
    cli("ls")
    database = cli.home / "nimble-jobs.db"
    database.write_bytes(b"\xff" * database.stat().st_size)
    answer = cli("doctor", "--no-device", "--json")
    assert answer.code == 100
    assert any(f["status"] == "problem" for f in answer.json["findings"])
